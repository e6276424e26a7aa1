"""Layers that compute a shard of the tokens: their arguments are cut, and their attention exchanges heads."""
