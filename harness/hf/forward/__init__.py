"""The model's own forward with its decoder layers lifted out: what runs before, between and after them."""
