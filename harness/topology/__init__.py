"""Who talks to whom: layout arithmetic, process groups, host placement, what the launcher said.

`layout`, `placement` and `env` need no torch, so nothing is imported here.
"""
