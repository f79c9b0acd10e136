"""Bytes between nodes: authenticated, sealed connections and the reductions over them, native or by gloo.

Owns handshakes, the node's one port, links and the shape of a reduction. Knows members by name and address only: who
belongs to an epoch is decided above it.
"""
