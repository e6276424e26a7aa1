"""Turn samples into micro-batches: order, collation, padding, streams for training and evaluation.

The samples of a step depend only on the seed and the number of consumed samples, never on the layout. Functions take
the data-parallel coordinate as two integers. Only `same_data.py` runs a collective.
"""
