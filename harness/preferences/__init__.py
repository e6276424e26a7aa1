"""Training on preferences: pairs of a chosen and a rejected completion, or completions with a label."""
