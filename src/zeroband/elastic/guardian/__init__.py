"""The guardian: a small process next to the trainer that holds the node's lease, its port and its probes of the others.

It loads no torch, so that it is up at once and survives what stops the interpreter of a trainer.
"""
