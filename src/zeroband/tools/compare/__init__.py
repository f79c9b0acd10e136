"""`zeroband compare`: compare methods from one warm start on the same data.

Owns the table of methods, the choice of runs and learning rates, and the report. Each run is a cluster of nodes on this
machine.
"""
