"""Collectives of CPU tensors among ranks of one host, through memory that they share."""
