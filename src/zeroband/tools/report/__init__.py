"""The report of a run: one HTML file with everything that its nodes recorded, for whoever reads it later.

Reads a run directory and writes that file; knows no store, and nothing that it does reaches a run.
"""
