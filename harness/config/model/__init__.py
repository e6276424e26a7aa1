"""What a model's config.json alone tells about possible layouts. No torch, no transformers."""
