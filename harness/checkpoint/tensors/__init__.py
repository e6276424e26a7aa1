"""Sharded tensors: which part of a tensor each rank holds, and how parts are written, read and sent to other ranks."""
