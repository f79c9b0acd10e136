"""The guardian: a small process next to the trainer that holds the node's lease and port, and probes other nodes.

It does not load torch, so it starts fast, and it keeps running while the trainer's interpreter stalls.
"""
