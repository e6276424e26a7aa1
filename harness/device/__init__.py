"""The process group and the device of this rank: start them, their memory, moments on them."""
