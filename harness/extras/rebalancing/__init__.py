"""Layers that move between pipeline stages while a run trains."""
