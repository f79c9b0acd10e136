"""One round as a transaction: announce, open, exchange, vote, verdict, apply; and the journal of what was decided.

Owns the member's part in it and the ElasticDeviceMesh. Knows no outer algorithm.
"""
