"""Save checkpoints during training, and resume them in any layout."""
