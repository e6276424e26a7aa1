"""What a run can do without: an optional way to train, or to do the same faster."""
