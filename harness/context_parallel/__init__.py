"""Layers that compute a shard of the tokens: their arguments are cut, and their attention exchanges heads.

Tiles of tokens, for the loss and for blocks of a layer.
"""
