"""Start, watch and restart a run.

`launch` describes who starts whom. On each host torch's elastic agent (`elastic`) meets the others (`rendezvous`),
starts the ranks there (`on_host`), and restarts all of them from the newest checkpoint when the leader decides so
(`leading`, by the rules in `judging` and the `reports`). Inside the ranks, `process` handles signals and records
failures, and `watch` finds ranks that are dead, hang or are slow.
"""
