"""Write and show what happens in a run: progress, metrics, run.json."""
