"""Durable checkpoints: written during training by another process, committed by a manifest, verified when read.

Knows no members; `elastic.recovery` fetches a joiner's state from memory.
"""
