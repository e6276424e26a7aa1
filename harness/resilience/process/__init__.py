"""This rank's process: its activity, signals, failure records, and the launcher above it."""
