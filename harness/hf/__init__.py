"""HuggingFace decoders as lists of pipeline layers; `plans/` and `presets/` hold data, the code names no family."""
