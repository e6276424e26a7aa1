"""Check and prepare the inputs of a run: data sets, prompts and functions."""
