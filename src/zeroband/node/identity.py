"""A node's name and folder."""

from __future__ import annotations

import socket
from pathlib import Path

from zeroband.config.schema import RunConfig


def node_id_of(config: RunConfig) -> str:
    """Return the node's name for the life of the run; the host name by default."""
    return config.node.id or socket.gethostname()


def node_dir_of(config: RunConfig) -> Path:
    """Return `<run.dir>/<run.id>/<node id>`."""
    return config.run.dir / config.run.id / node_id_of(config)
