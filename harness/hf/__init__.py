"""HuggingFace decoders as lists of pipeline layers. No code names a model family: their data is in `models/plans/`."""
