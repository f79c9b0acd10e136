"""Whether this machine can do what a configuration asks for, before anything starts.

`checklist.py` has the one list of checks: those that `train` makes at its start, all of them quick and without torch,
and those that take longer, which open what training would open (`inputs.open_inputs`) or rehearse a step
(`memory.gpu_memory`). `doctor` makes both, so it finds what `train` would refuse. What a run takes is predicted in one
place each: `needs.py` for a node's memory and disks, `gpu_prediction.py` for its GPUs.
"""
