"""A node's flat state: its buffers, their fragments, and the copy that survives a crash. Knows no algorithm."""
