"""What a run can do besides training a model's own weights."""
