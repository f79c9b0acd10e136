"""`zeroband doctor`: check whether this machine can take part in a run, and measure its links to the other nodes.

Uses a run's configuration, store, port and data path.
"""
