"""Run the rules on a config: the list of all rules, and the check."""
