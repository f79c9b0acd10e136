"""Kernels: the native library (C++ in `csrc/`: codecs, transfer engine), Triton kernels, and plain torch references.

Knows no nodes and no runs.
"""
