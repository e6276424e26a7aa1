"""Pipeline stages: their boundaries, the order in which they compute, what they send and what they recompute."""
