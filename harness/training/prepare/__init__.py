"""Prepare everything that a run needs before its first step, from the Trainer's arguments."""
