"""Profiled steps (`--profile`): measuring them (`measuring`, which needs torch), their records and their summaries."""
