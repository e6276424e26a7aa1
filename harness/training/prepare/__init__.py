"""From arguments to everything that a run needs, before the first step."""
