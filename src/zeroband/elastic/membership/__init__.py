"""Membership rules as pure functions: who takes part in a round, when its result is committed, operators' orders.

Owns the records that members exchange and their keys. Knows no store, socket or clock.
"""
