"""The model's own forward without its decoder layers: what runs before, between and after them."""
