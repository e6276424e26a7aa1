"""HuggingFace's interface for programs written for its Trainer: names, files, reports, the hub; what is not here."""
