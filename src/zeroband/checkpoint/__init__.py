"""Snapshots of the committed state and where they go: to a joining node, and to durable checkpoints."""
