"""Commands around runs: start, watch, test, compare, plan and control them. No other room imports this one."""
