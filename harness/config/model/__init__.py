"""What a model's config.json alone tells about layouts. No torch, no transformers."""
