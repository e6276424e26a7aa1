"""Profiled steps (`--profile`): measuring them (`spans`, `clocks`, `memory`, which need torch), records, summaries."""
