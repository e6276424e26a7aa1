"""The verbs of `ds-harness` that plan and predict."""
