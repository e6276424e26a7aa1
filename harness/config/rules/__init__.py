"""The rules, a file for each part of the config. A new rule is one function in one of these files."""
