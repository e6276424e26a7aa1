"""Tokens that travel to experts on other data-parallel ranks, and what is computed meanwhile."""
