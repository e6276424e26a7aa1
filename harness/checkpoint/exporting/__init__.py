"""The trained model as a HuggingFace directory: whole weights, adapters, in files that replace older ones at once."""
