"""What runs on each host of a run: the agent, which starts the ranks there and lets none of them outlive it.

`messages` has what the supervisor and an agent say to each other, `standby` the process that has imported everything
before a restart needs it, `processes` how all that belongs to a run is found and ended. No torch here, but in the
process that stands by.
"""
