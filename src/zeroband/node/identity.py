"""What a node is called, and where it writes."""

from __future__ import annotations

import socket
from pathlib import Path

from zeroband.config.schema import RunConfig


def node_id_of(config: RunConfig) -> str:
    """The name of this machine for the life of the run."""
    return config.node.id or socket.gethostname()


def node_dir_of(config: RunConfig) -> Path:
    """`<run.dir>/<run.id>/<node id>`, where this node writes."""
    return config.run.dir / config.run.id / node_id_of(config)
