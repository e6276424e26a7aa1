"""The supervisor of a run: it starts the ranks, finds why one failed, and starts them again from the newest checkpoint.

`ds-harness launch` (`command`) asks `supervisor` for attempts until one succeeds. An `attempt` has one agent on each
host (`on_host`), which starts the ranks there; `ready` keeps agents for the next one. No torch here.
"""
