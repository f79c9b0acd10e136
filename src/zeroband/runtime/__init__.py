"""From a configuration to a node in a run: builds its parts, joins, checkpoints, reports, gives everything back."""
