"""Compare a sharded model with the whole one, on a tiny copy."""
