"""Write what happens in a run: metrics, evaluations, samples, run.json."""
