"""Parallelism: how tensors and layers are sharded over ranks, and how ranks communicate."""
