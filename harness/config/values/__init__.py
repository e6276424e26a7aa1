"""What single values of a config mean: their type, pointers, sizes of the layout, the batch, keys without effect.

The lowest folder of `config`: rules, schema and resolving all build on it, and it imports none of them.
"""
