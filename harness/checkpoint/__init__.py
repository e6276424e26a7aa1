"""Save a run in the background while it trains, resume it, and export the model as a HuggingFace directory."""
