"""The rules, one file per topic. A new rule is one function in one of these files."""
