"""Turns documents into micro-batches: sources, tokenizers, token stores, mixtures, the order, the ledger, the loader.

Knows no other node and no optimizer; the order is a function of the seed.
"""
