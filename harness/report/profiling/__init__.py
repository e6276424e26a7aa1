"""Some steps of a run measured (`--profile N`): what every rank does when, what layers take, what memory holds."""
