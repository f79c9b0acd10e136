"""Live recovery: members serve their state from memory; a joiner fetches and verifies it.

Knows no disk; `checkpoint` reads checkpoints.
"""
