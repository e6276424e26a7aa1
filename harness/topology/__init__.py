"""The topology of a run: layout arithmetic, process groups, placement on hosts, launchers.

`layout`, `hosts` and `env` need no torch, so nothing is imported here.
"""
