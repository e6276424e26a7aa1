"""Trials of a model on a tiny copy before a run: its sharding, packed documents, tokens split over ranks."""
