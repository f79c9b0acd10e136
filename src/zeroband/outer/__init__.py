"""Outer algorithms: what nodes contribute to a round, and how the outer state steps by what they made of it.

An algorithm (`algorithm.py`) is called by a schedule (`many_steps.py`, `every_step.py`), which has rounds made by
`elastic/rounds/runner.py`. Knows no stores or sockets.
"""
