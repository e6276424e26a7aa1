"""What a model's config.json alone says about layouts. No torch, no transformers."""
