"""Training in any composition of features, held to plain torch and transformers in one process."""
