"""One decoder layer: its arguments, its output, and a run of it without weights."""
