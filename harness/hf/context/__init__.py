"""Layers that work on a stretch of the tokens: which of them can, and how they are run."""
