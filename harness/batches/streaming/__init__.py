"""Read samples from a stream while the run trains: rows -> samples -> one endless data set."""
