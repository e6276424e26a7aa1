"""Pipeline schedules: the order in which a stage computes, what it exchanges with its neighbours, and when it waits."""
