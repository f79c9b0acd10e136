"""The page of a run: `zeroband board`. Reads what nodes recorded; nothing in it slows or ends one."""
