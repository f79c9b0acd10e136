"""The demo: four nodes on this machine train a small model; one is killed and returns.

It shows only what any run records in its files.
"""
