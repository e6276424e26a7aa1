"""Read data files and data sets as documents: find files, parse rows, keep memory-mapped copies."""
