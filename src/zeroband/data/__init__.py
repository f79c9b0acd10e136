"""Documents to micro-batches: sources, tokenizers, token stores, mixtures, sample order, ledger, loader.

Independent of other nodes and of the optimizer; the sample order is a function of the seed.
"""
