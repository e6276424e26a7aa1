"""Start, watch and restart a run.

`launch` says who starts whom. On each host torch's elastic agent (`elastic`) meets the others (`rendezvous`), starts
the ranks there (`on_host`), and starts all of them again from the newest checkpoint as the leader decides (`leading`,
by the rules of `judging` and what `reports` say). Inside the ranks, `process` handles signals and records a failure,
and `watch` finds a rank that is dead, hangs or is slow.
"""
