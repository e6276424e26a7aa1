"""Average gradients over data-parallel ranks in 8 or 4 bits."""
