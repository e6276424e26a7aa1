"""The sources of a model's values: checkpoint files, initialisation, a model in memory."""
