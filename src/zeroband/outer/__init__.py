"""Outer algorithms: how nodes make their contributions, and how the outer state steps by the combined result.

A schedule (`many_steps.py`, `every_step.py`) calls an algorithm (`algorithm.py`), and runs rounds by
`elastic/rounds/runner.py`. Knows no stores or sockets.
"""
