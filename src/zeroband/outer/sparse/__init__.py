"""Sparse payloads: the largest values of each chunk, as bytes. Owns no state, no transport and no outer step."""
