"""Layers, losses and gradients that are split over a tensor-parallel group."""
