"""Linear layers whose products are computed in 8-bit floating point."""
