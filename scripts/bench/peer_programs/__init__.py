"""One training step as each library does it, for `peers.py`: the same model, data, optimizer and clipping."""
