"""Data files and data sets -> documents: what is where, how a row is read, copies that can be mapped."""
