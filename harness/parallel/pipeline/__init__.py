"""Pipeline stages: where they are cut, in which order they compute, what they send, what they recompute."""
