"""`zeroband doctor`: whether this machine can take part in a run, and what its links to the other nodes carry.

Owns checks and advice. Uses what a run uses: its configuration, its store, its port, its data path.
"""
