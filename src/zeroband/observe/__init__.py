"""What a run shows of itself: log lines, metrics, events, durations, and the reader of a run directory.

Owns the tables of metric and event names, and the two files `metrics.jsonl` and `events.jsonl`, which are the truth.
Decides nothing about the run, and a failure in here never ends it. Importing any of it loads no torch.
"""
