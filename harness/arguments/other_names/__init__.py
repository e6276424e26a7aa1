"""Names that other programs have for flags, and what to write here instead."""
