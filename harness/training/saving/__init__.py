"""What a run keeps and goes back to: checkpoints beside training, resuming, rolling back, the trained model."""
