"""Pipeline stages: where they are cut, what they send, what they recompute."""
