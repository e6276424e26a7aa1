"""Tensor-parallel plans: what becomes of each module of a model, and the code that does it."""
