"""Gradients that data-parallel ranks average in 8 or 4 bits."""
