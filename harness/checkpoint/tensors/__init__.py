"""Whole tensors of which each rank holds a part: which part, how it is written, read, and handed to other ranks."""
