"""Durable checkpoints: written during training by another process, committed by a manifest, verified when read.

Knows no members; a joiner's state from memory is `elastic.recovery`'s.
"""
