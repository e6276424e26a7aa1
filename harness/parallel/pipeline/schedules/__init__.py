"""Pipeline schedules: the order of a stage's passes, its sends and receives, a simulation of its idle time."""
