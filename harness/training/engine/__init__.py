"""Build DeepSpeed's engine, patch it, and use it behind one narrow interface."""
