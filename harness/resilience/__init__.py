"""Start, watch and restart a run. No torch outside of `watch` and `process/distributed`.

`launch` says who starts whom. `supervisor` starts the ranks, finds why one failed, and starts all of them again from
the newest checkpoint. One start is an `attempt`: an agent on each host (`on_host`) starts the ranks there. Inside the
ranks, `process` handles signals, process groups and the record of a failure, and `watch` finds a rank that is dead,
hangs or is slow. Imports go one way: launch -> supervisor -> attempt -> on_host, and watch -> process.
"""
