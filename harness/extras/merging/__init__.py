"""Merge adapters into their base model, a layer and a file at a time: `ds-harness checkpoint merge`."""
