"""Context parallelism: ranks that read the same samples keep a stretch of the tokens each."""
