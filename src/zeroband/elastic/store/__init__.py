"""The run's Redis: its keys, what runs inside it, the connection, seals on every record, and a server of one's own.

What members give back to a store that forgot lies here as well. Decides nothing about members.
"""
