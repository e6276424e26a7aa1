"""Rules about stages, tensor parallelism and the model."""
