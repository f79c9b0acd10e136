"""The canonical flat state of a node: its buffers, the fragments that they are cut into, what survives a crash.

Knows no round and no algorithm.
"""
