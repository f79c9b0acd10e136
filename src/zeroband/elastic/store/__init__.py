"""What nodes need of the store between them, and the Redis that keeps it.

Keys, what runs inside Redis, the connection, seals on every record, a server of one's own; and what members give back
to a store that forgot. Decides nothing about members.
"""
