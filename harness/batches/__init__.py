"""Turn samples into micro-batches: order, collation, padding, streams for training and evaluation.

Which samples a step gets is a function of the seed and of the samples consumed so far, never of the layout. Functions
get the data-parallel coordinate as two integers. Only `same_data.py` communicates with other ranks, through a
collective.
"""
