"""What `scripts/bench/gpu.py` measures, a module for each kind of part."""
