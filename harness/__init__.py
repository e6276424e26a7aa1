"""Train any HuggingFace decoder with DeepSpeed: pipeline, tensor and data parallel from one JSON.

Importing this package imports neither torch nor deepspeed; `Trainer` and its companions are loaded on first use.
"""
