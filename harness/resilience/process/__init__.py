"""This process among others: process group, signals, the launcher above."""
