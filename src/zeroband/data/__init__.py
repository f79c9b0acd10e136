"""Turns documents into micro-batches: sources, tokenizers, the token cache, the sample index, the ledger, the loader.

Knows no other node and no optimizer; the order is a function of the seed.
"""
