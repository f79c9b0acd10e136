"""`zeroband top`: a run in a terminal.

Owns the screen that top and the demo share, and what is shown on it; reads facts, and reaches no run.
"""
