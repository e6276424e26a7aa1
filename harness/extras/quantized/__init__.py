"""A frozen base model in 4 bits under LoRA adapters (QLoRA, Dettmers et al. 2023, arXiv 2305.14314)."""
