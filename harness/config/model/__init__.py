"""Facts about possible layouts from a model's config.json alone. Imports neither torch nor transformers."""
