"""The report of a run: the page saved with its data inside, and what only a report says.

Reads a run directory and writes that file; knows no store, and nothing that it does reaches a run.
"""
