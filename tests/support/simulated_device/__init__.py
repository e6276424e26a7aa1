"""An accelerator that is not there, for tests of what runs on GPUs; see `device.py`."""
