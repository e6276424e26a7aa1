"""Layers that work on a shard of the tokens: which of them can, and how they are run."""
