"""Build DeepSpeed's engine with its optimizer, schedule and loss, and use it behind one narrow interface."""
