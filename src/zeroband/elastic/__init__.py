"""Nodes that come and go: the part that keeps one run going on unreliable machines.

Its floors, each of which knows only those below it: `membership` (pure rules), `store` (Redis), `transport` (bytes
between nodes), `guardian` (the process next to the trainer), `recovery` (a joiner's state), `rounds` (one round as a
transaction). Outer algorithms stand on top of it and know no store.
"""
