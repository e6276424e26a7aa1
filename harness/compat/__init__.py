"""The matrix of families: what holds for which, found by running it on tiny models.

`commands` is the verb `ds-harness models`, `launch` starts two ranks and survives them, `cells` is what they run.
"""
