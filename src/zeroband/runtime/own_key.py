"""The file in which a node keeps its own key: made at its first start, private to its user, the same after restarts."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from zeroband.config.schema import RunConfig
from zeroband.elastic.membership.node_key import SECRET_BYTES, NodeKey
from zeroband.elastic.membership.run_key import RunKey
from zeroband.errors import ConfigError
from zeroband.observe.log import get_logger
from zeroband.observe.view import short_key

KEY_FILE = "node.key"
"""In the node's folder of the run directory."""

_log = get_logger(__name__)


def run_keys(config: RunConfig, folder: Path) -> RunKey:
    """The keys with which the node of this folder takes part in a run. Raises ConfigError."""
    token = config.run.token.get_secret_value() if config.run.token else None
    return RunKey.of(token, config.run.id, node=own_key(folder))


def own_key(folder: Path) -> NodeKey:
    """The key of the node that writes to this folder, which is made where there is none. Any process of the node.

    Raises ConfigError where the file holds none, can be read by other users, or cannot be made.
    """
    path = folder / KEY_FILE
    try:
        if not path.exists():
            _make(path)
        with path.open("rb") as file:
            content, found = file.read(SECRET_BYTES + 1), os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(f"the key of this node, {path}, cannot be kept: {error.strerror}") from error
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise ConfigError(f"the key of this node, {path}, is open to other users (mode {mode}); chmod 600 it")
    if len(content) != SECRET_BYTES:
        raise ConfigError(
            f"the key of this node, {path}, holds {len(content)} bytes instead of {SECRET_BYTES}; remove the file, "
            "and the node gets another key and is another node to the run"
        )
    return NodeKey(content)


def _make(path: Path) -> None:
    """Write a new key, whole, unless another process of the node is faster. Raises OSError."""
    key = NodeKey.new()
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.secret)
            file.flush()
            os.fsync(file.fileno())
        os.link(whole, path)
    except FileExistsError:
        return
    finally:
        whole.unlink()
    fields = {"key": short_key(key.name("")), "file": str(path)}
    _log.info("made this node a key: to the run it is a node that was not there before", extra={"fields": fields})
