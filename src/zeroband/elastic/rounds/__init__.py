"""A round as a transaction: announce, open, exchange, vote, verdict, apply; and the journal of committed rounds.

Owns the member's side of it and the ElasticDeviceMesh. Knows no outer algorithm.
"""
