"""The page of a run: `zeroband board`. Reads what nodes recorded, beside the run; nothing in it slows or ends one."""
