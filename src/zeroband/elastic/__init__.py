"""Nodes that come and go: the wing that keeps one run on machines that nobody can rely on.

Its floors, each of which knows only those below it: `membership` (pure rules), `store` (Redis), `transport` (bytes
between nodes), `guardian` (the process beside the trainer), `recovery` (a joiner's state), `rounds` (one round as a
transaction). Outer algorithms stand on top of it and know no store.
"""
