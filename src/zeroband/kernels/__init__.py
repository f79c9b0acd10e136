"""Kernels: codecs for what travels between nodes, in C++, and the engine that moves it. `csrc/` holds the sources.

Owns the native library and the plain torch reference of everything in it that computes. Knows no nodes and no runs.
"""
