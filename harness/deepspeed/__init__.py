"""Everything private of DeepSpeed that the harness reads, overrides or replaces: one function or class each.

`touches` lists them all, with the reason and the version that each was seen in.
"""
