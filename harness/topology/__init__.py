"""The ranks of a run: layout arithmetic, process groups, hosts, launchers' variables; how ranks meet, agree and fail.

`layout`, `hosts` and `env` need no torch, so nothing is imported here.
"""
