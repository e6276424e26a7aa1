"""From text and conversations to micro-batches: sources -> documents -> blocks or samples -> stream, and evaluation.

Which sample a step sees is a function of the seed and of the samples consumed so far, never of the layout.
Nothing here knows of process groups: a data-parallel coordinate is two integers, a barrier is a callable.
Importing this package, or `sources` for its early checks, imports neither torch nor datasets.
"""
