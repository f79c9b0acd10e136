"""The store that a run's nodes share, in Redis.

Keys, Lua scripts, the connection, sealed records, failover between stores, a local server, and members' backups that
restore lost records. The rules that members follow are in `membership`.
"""
