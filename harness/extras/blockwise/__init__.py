"""Optimizers of bitsandbytes, with states in 8 bits or in pages that a GPU may evict, in every layout."""
