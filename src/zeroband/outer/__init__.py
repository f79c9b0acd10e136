"""Outer algorithms: what nodes contribute to a round, and how the outer state steps by what they made of it.

Knows no members, stores or sockets: a round is `elastic/rounds`, whose `RoundCoordinator` every algorithm is.
"""
