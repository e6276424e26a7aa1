"""The flags, a file for each theme."""
