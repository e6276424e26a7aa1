"""The verbs of `ds-harness` that concern configs, and how findings are printed, fixed and documented."""
