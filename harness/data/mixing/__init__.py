"""Several sources in one run of samples, by their weights."""
