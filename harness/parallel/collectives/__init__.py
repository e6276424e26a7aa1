"""Collectives of CPU tensors among ranks of one host, through shared memory."""
