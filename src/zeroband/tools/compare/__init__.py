"""`zeroband compare`: methods side by side from one warm start, on the same data, as real processes.

Owns the table of methods, which runs are made and which learning rate counts, and the page that shows it. Trains
nothing itself: each run is a cluster of nodes on this machine.
"""
