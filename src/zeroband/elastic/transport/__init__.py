"""Bytes between nodes: authenticated, encrypted connections and reductions over them, native or with gloo.

Owns handshakes, links and the shape of a reduction. Knows members only by name and address; higher layers decide who
belongs to an epoch.
"""
