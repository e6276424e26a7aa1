"""The process group and the device of this rank: their start, memory, moments, and operators that are compiled."""
