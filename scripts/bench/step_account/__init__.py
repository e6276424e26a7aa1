"""The account of a step, which `scripts/bench/account.py` prints: its operations, what is fused, what they cost."""
