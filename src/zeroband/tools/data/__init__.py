"""`zeroband data`: what is done with data outside of a run.

Owns making ids of text once for all runs (prepare), looking at them (inspect), and counting what a run trained (audit).
Knows no model and no node.
"""
