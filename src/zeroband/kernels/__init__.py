"""Kernels: codecs for what travels between nodes, in C++, and the engine that moves it. `csrc/` holds the sources.

Owns the native library, the Triton kernels of a GPU, and the plain torch reference of everything in them that computes.
Knows no nodes and no runs.
"""
