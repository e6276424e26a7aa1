"""Everything private of DeepSpeed that the harness reads, overrides or replaces: one function or class each.

`private_uses.json` lists all of it, with the reason and the version of DeepSpeed that it was seen in. A test
looks each of them up in the installed DeepSpeed, and names those that another version has changed.
"""
