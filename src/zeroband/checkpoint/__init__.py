"""Durable checkpoints: written beside training by a process of their own, committed by a manifest, verified when read.

Knows no members; a joiner's state from memory is `elastic.recovery`'s.
"""
