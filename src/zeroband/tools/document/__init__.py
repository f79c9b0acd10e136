"""Documents that people keep: one HTML file each, without scripts and without other files.

The design that the pages of `report` and `compare` share; what stands in them is theirs.
"""
