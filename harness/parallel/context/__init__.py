"""Context parallelism: each sequence is split among data-parallel ranks."""
