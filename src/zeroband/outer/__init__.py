"""Outer algorithms: how nodes become one model. Owns the canonical flat state and the transaction on it."""
