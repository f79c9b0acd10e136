"""Membership: who is in the run, which round is open to whom, and what was decided."""
