"""Where a model's values come from: checkpoint files, initialization, a model in memory."""
