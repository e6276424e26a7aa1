"""The meaning of single values of a config: types, pointers, sizes of the layout, the batch, keys without effect.

This is the lowest folder of `config`: rules, schema and resolving build on it, and it imports none of them.
"""
