"""Put what was trained back into a model's own files: adapters (`ds-harness checkpoint merge`), or a text decoder."""
