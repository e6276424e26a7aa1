"""Pipeline schedules: the order of a stage's passes, its sends and receives, and a simulation of its waits."""
