"""The Trainer: prepare a run, drive DeepSpeed's engine step by step, record, save, evaluate."""
