"""Turn text and conversations into samples: sources -> documents -> blocks or samples.

Only `on_disk/cache.py` communicates with other ranks, through the store. Importing this package, or `files/sources.py`
for its early checks, imports neither torch nor datasets.
"""
