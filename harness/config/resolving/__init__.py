"""From "auto" to the config that DeepSpeed gets."""
