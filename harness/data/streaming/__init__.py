"""Make samples of files and of an IterableDataset while the run trains: rows -> samples -> one endless data set."""
