"""Rules about the text, the keys and the types of values."""
