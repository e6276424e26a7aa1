"""The process group and the device of this rank: startup, memory, kernels and compiled operators."""
