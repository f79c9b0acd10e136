"""`zeroband chaos`: random faults on a run of several nodes on this machine, and what must hold through them.

Owns the plan of faults (pure), their effects, the checks (pure) and the report. The nodes, networks and servers are
`cluster`'s; nothing here runs in a training.
"""
