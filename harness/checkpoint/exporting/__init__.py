"""Export the trained model as a HuggingFace directory, weights or adapters, replacing an older model atomically."""
