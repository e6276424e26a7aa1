"""The optimizer and the scheduler of `Trainer(optimizers=...)`, for the parameters that a rank trains."""
