"""Snapshots of the committed state and where they go; here: to a joining node."""
