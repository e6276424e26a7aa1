"""The matrix of model families: what each can do, found out by running it on a tiny model.

`commands` is the verb `ds-harness models`. `launch` starts two ranks, and new ones if they die; they run `cells`.
"""
