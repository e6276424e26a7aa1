"""Make samples of files and of an IterableDataset of documents while the run trains."""
