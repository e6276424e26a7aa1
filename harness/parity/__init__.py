"""Compare training in any composition of features with plain torch and transformers in one process."""
