"""Every private part of DeepSpeed that the harness reads, overrides or replaces: one function or class for each.

`private_uses.json` lists them, with the reason and the DeepSpeed version that they were seen in. A test looks each of
them up in the installed DeepSpeed and names those that another version has changed.
"""
