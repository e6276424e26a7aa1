"""What a run writes and shows: progress, metrics, run.json."""
