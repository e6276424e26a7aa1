"""Samples -> micro-batches: order, collation, streams for training and evaluation."""
