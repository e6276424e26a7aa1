"""Turn text and conversations into micro-batches: sources -> documents -> blocks or samples -> training and evaluation.

Which samples a step gets is a function of the seed and of the samples consumed so far, never of the layout.
Functions get the data-parallel coordinate as two integers. Only `on_disk/cache.py` (through the store) and
`batches/same_data.py` (through a collective) communicate with other ranks.
Importing this package, or `files/sources.py` for its early checks, imports neither torch nor datasets.
"""
