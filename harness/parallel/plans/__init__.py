"""Tensor-parallel plans: how each module of a model is cut, and the code that cuts it."""
