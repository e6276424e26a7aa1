"""Save checkpoints during training, resume and roll back, and export the trained model."""
