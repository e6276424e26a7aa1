"""One decoder layer: what it is given, what it returns, and a run of it without its weights."""
