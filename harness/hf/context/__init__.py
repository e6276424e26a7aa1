"""Which modules of a model can compute a shard of the tokens, and how ranks split the hidden state between layers."""
