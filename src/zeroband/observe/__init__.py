"""Observability: logs, metrics, events, their sinks, and the history and status of a run.

Owns the tables of metric and event names and the files `metrics.jsonl` and `events.jsonl`, the source of truth.
Never affects the run, even by failing. Importing it does not load torch.
"""
