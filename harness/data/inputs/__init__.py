"""What is handed to a run: data sets, prompts, and whether they are of the right kind."""
