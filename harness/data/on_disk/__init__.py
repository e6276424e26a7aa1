"""Keep prepared data on disk: written once by all cores, resumable after an interruption, memory-mapped afterwards."""
