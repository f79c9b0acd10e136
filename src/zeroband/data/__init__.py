"""From documents to micro-batches: sources, tokenizers, the token cache, the global sample index, the ledger of who
reads what, and the loader of one rank. Knows no other node and no optimizer; the order is a function of the seed."""
