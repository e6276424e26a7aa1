"""The trained model as files of HuggingFace or peft, or gathered in memory."""
