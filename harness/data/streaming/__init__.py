"""Make samples while the run trains: rows of files or of an IterableDataset -> samples -> one endless data set."""
