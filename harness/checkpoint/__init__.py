"""Save and resume a run; export the model as a HuggingFace directory."""
