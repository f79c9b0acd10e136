"""Whether this machine can do what a configuration asks for, before anything starts.

Owns the checks that `train` makes at its start, all of them quick and without torch (`quick.py`), and what takes longer
because it opens what training would open (`inputs.open_inputs`) or rehearses a step (`memory.gpu_memory`,
`gpu_prediction.py`). `doctor` makes both, so it finds what `train` would refuse.
"""
