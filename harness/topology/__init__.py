"""Who talks to whom: layout arithmetic, process groups and named sets, host placement, the launcher's environment.

`layout`, `placement` and `env` need no torch, so nothing is imported here.
"""
