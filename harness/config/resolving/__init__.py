"""Resolve a config with "auto" to the config passed to DeepSpeed."""
