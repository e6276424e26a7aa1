"""Save a run beside its training, and resume it; export the model as a HuggingFace directory."""
