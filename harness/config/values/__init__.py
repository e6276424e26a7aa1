"""Single values of a config: types, pointers, layout sizes, the batch, keys without effect.

This is the lowest folder of `config`: rules, schema and resolving import it, never the other way round.
"""
