"""HuggingFace decoders as lists of pipeline layers. The code names no family; `models/plans/` has data of families."""
