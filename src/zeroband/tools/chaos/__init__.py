"""`zeroband chaos`: inject random faults into a run of several nodes on this machine and check its invariants.

Owns the plan of faults (pure), their injection, the checks (pure) and the report. `cluster` owns the nodes, networks
and servers.
"""
