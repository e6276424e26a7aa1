"""Train a tiny model on ranks of this machine, and again by plain torch and transformers in one process; compare both.

A composition is what is tried: a model, a training and its layouts. `launch` starts the ranks, and new ones if they
die; they run `execute`. `reference` is the one process, and `trial` judges. `certify` tries the config of a user
(`ds-harness verify`), `cells` every family of models in a few layouts (`ds-harness models`).
"""
