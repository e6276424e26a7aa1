"""Gradients sent in 8 or 4 bits between data-parallel ranks."""
