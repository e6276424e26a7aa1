"""A config file as text: parser, places of keys, edits."""
