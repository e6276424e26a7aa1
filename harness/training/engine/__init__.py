"""DeepSpeed's engine behind one narrow interface: built, stepped, measured."""
