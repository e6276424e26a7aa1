"""Prepared data on disk: made once by all cores, kept when interrupted, mapped from then on."""
