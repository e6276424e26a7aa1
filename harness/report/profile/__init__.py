"""What `--profile` has measured of a run's steps: the records, and what follows from them. No torch."""
