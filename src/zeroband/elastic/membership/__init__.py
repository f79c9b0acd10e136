"""The rules of membership as pure functions: who takes part in a round, when its result counts, what orders make of it.

Owns the records that members exchange and the key that they share. Knows no store, no socket and no clock.
"""
