"""Checks before anything starts: whether this machine can do what a configuration asks for.

`checklist.py` lists all checks: quick ones without torch, which `train` makes at its start, and slower ones, which open
what training would open (`inputs.open_inputs`) or rehearse a step (`memory.gpu_memory`). `doctor` makes both, so it
finds everything that `train` would refuse. Memory and disk needs are predicted in `needs.py` for a node, in
`gpu_prediction.py` for its GPUs.
"""
