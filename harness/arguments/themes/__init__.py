"""The flags, one file per theme."""
