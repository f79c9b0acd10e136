"""A joiner's state: members serve it from memory, the joiner chooses whom to believe, fetches and verifies it.

Knows no disk; checkpoints are read in `checkpoint`.
"""
