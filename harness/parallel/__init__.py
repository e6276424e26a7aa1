"""Parallelism: how tensors and layers are cut over ranks, and how ranks communicate."""
