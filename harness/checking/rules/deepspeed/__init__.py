"""Rules about what DeepSpeed does with a section."""
