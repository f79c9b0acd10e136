"""A node's folder of the run directory: its lock, the node's key, and the run that its files belong to.

One trainer holds the lock. `node.key` is created at the node's first start and kept. `run.json` names the session:
metrics and events of two runs never mix. A start continues the files of its own session, and those of a run whose
checkpoint its own run continues. Others are refused, or moved aside if the user asks for it. Local rank 0.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from zeroband.checkpoint.loading import open_checkpoint, steps_in_order
from zeroband.checkpoint.ownership import read_owner
from zeroband.checkpoint.storage import open_storage, reason_of
from zeroband.config.render import render_toml
from zeroband.config.schema import RunConfig
from zeroband.elastic.membership.keys import SECRET_BYTES, NodeKey, RunKey
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, Verdict
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import CheckpointDamaged, ConfigError
from zeroband.node.launched import is_restart
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import CONFIG_FILE
from zeroband.observe.log import get_logger
from zeroband.observe.metrics import METRICS_FILE
from zeroband.observe.view import short_key
from zeroband.runtime.node_parts import NodeParts

RUN_FILE = "run.json"
KEY_FILE = "node.key"

_MOVED = (METRICS_FILE, EVENTS_FILE, CONFIG_FILE, RUN_FILE)
_ASIDE = "before-"
_FIRST_CONTACT_S = 30.0
_LOOK_S = 0.2
_LOOKED_AT_S = 1.0
"""Time for which a node that ends may hold the lock, to see whether this one is running."""
_SHOWN = 8
"""Digits of a session in messages."""

_log = get_logger(__name__)


# -- lock and key --------------------------------------------------------------------------------------------------


def claim(node: NodeParts) -> int:
    """Lock the node's folder against a second trainer. The kernel releases the lock with the process."""
    node.node_dir.mkdir(parents=True, exist_ok=True)
    folder = os.open(node.node_dir, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems have no locks
        try:
            _lock(folder)
        except BlockingIOError:
            os.close(folder)
            if _is_open_here(node.node_dir):
                raise ConfigError(
                    f"this process is node {node.node_id!r} of run.id={node.config.run.id!r} already, as after running "
                    "a notebook cell twice; close the first optimizer before you make another: optimizer.close()"
                ) from None
            raise ConfigError(
                f"node.id={node.node_id!r} of run.id={node.config.run.id!r} is already running and writes to "
                f"{node.node_dir}; give this node another node.id or run.id"
            ) from None
    return folder


def _is_open_here(path: Path) -> bool:
    """Whether this process has a folder open."""
    opened = Path("/proc/self/fd")
    names = opened.iterdir() if opened.is_dir() else ()
    return any(os.path.realpath(name) == os.path.realpath(path) for name in names)


def _lock(folder: int) -> None:
    """Lock a folder, with a short wait for a node that ends and checks it. Raises BlockingIOError."""
    until_s = time.monotonic() + _LOOKED_AT_S
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.05)


def is_claimed(folder: Path) -> bool:
    """Whether a living trainer holds a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # some network file systems have no locks
        return False
    finally:
        os.close(descriptor)
    return False


def run_keys(config: RunConfig, folder: Path | None = None) -> RunKey:
    """Return the keys of a run; `folder`: with the key of the node that writes to it. Raises ConfigError."""
    token = config.run.token.get_secret_value() if config.run.token else None
    return RunKey.of(token, config.run.id, node=None if folder is None else own_key(folder))


def own_key(folder: Path) -> NodeKey:
    """Return the key of the node whose folder this is, created if missing. Any process of the node.

    Raises ConfigError if the file is damaged, readable by other users, or cannot be created.
    """
    path = folder / KEY_FILE
    try:
        if not path.exists():
            _create_key(path)
        with path.open("rb") as file:
            content, found = file.read(SECRET_BYTES + 1), os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(f"the key of this node, {path}, cannot be kept: {error.strerror}") from error
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise ConfigError(f"the key of this node, {path}, is open to other users (mode {mode}); chmod 600 it")
    if len(content) != SECRET_BYTES:
        raise ConfigError(
            f"the key of this node, {path}, holds {len(content)} bytes instead of {SECRET_BYTES}; remove the file, and "
            "the node gets a new key and counts as another node"
        )
    return NodeKey(content)


def _create_key(path: Path) -> None:
    """Write a new key atomically, unless another process of the node is faster. Raises OSError."""
    key = NodeKey.new()
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.secret)
            file.flush()
            os.fsync(file.fileno())
        os.link(whole, path)  # unlike a rename, fails if another process was faster
    except FileExistsError:
        return
    finally:
        whole.unlink()
    fields = {"key": short_key(key.name("")), "file": str(path)}
    _log.info("created a key for this node, which is new to the run", extra={"fields": fields})


# -- files of one run ------------------------------------------------------------------------------------------------


class RunFolder:
    """`<run.dir>/<run.id>/<node id>`, locked by this node's trainer."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._session: str | None = None
        self._config = ""

    def prepare(self, config: RunConfig, node_id: str, environ: Mapping[str, str]) -> None:
        """Make sure that new records continue the files that are there.

        Moves another run's files aside if the user asked for that, or to resume without a checkpoint; otherwise raises
        ConfigError. Raises StoreLost.
        """
        held = self._session_of_files()
        if held is not None and not is_restart(environ) and not _continues(held, config, node_id):
            if not config.run.start_over and config.resume is None:
                raise ConfigError(
                    f"{self._path} holds another run under run.id={config.run.id!r}"
                    f"{f' (session {held[:_SHOWN]})' if held else ''}; nothing was written to it. Continue from its "
                    "checkpoints with --resume, give this run another --run.id (auto generates one, for a run of one "
                    "node), or move those files aside with --run.start-over"
                )
            place = self._set_aside()
            held = None
            _log.warning("moved files of another run aside", extra={"fields": {"to": place}})
        if held is None:
            self.set_session(None)
        self._config = render_toml(config)
        (self._path / CONFIG_FILE).write_text(self._config, encoding="utf-8")

    def exists(self) -> bool:
        """Whether the folder still has what `prepare` wrote."""
        return (self._path / RUN_FILE).exists()

    def restore(self) -> None:
        """Write the session and the configuration again. Raises OSError."""
        (self._path / CONFIG_FILE).write_text(self._config, encoding="utf-8")
        self.set_session(self._session)

    def set_session(self, session: str | None) -> None:
        """Record whose files these are; None before the node is in a run."""
        self._session = session
        record, fresh = self._path / RUN_FILE, self._path / f".{RUN_FILE}"
        try:
            fresh.write_text(json.dumps({"session": session}), encoding="utf-8")
            fresh.replace(record)
        except OSError as error:  # a disk that fills up later must not end the training
            _log.warning(
                "cannot record the session of these files", extra={"fields": {"path": record, "why": str(error)}}
            )

    def _session_of_files(self) -> str | None:
        """Return the session whose files are here, empty if unknown; None without files of a run."""
        if not any((self._path / name).exists() for name in (METRICS_FILE, EVENTS_FILE)):
            return None
        try:
            session = json.loads((self._path / RUN_FILE).read_text(encoding="utf-8"))["session"]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return ""
        return None if session is None else str(session)

    def _set_aside(self) -> Path:
        number = 1 + sum(1 for _ in self._path.glob(f"{_ASIDE}*"))
        place = self._path / f"{_ASIDE}{number}"
        place.mkdir()
        for name in _MOVED:
            if (self._path / name).exists():
                (self._path / name).rename(place / name)
        return place


def _continues(held: str, config: RunConfig, node_id: str) -> bool:
    """Whether this start enters the run of a session, or continues from its state."""
    newest = None if config.outer is None else _newest_verdict(config)
    if newest is not None and (newest.session == held or Progress.of_verdict(newest).follows is not None):
        return True
    return config.resume is not None and _has_saved(held, config, node_id)


def _newest_verdict(config: RunConfig) -> Verdict | None:
    """Return the newest verdict in the store. If the store lost it, members restore it, or move, within a lease."""
    assert config.store.address is not None
    lease_s = config.fault.time_outs.lease_s
    url = config.store.address
    key = run_keys(config)
    with closing(RedisStore(url, config.run.id, key=key, lease_s=lease_s, retry_s=_FIRST_CONTACT_S)) as store:
        retry_s = config.elastic.start_timeout_s if store.has_several else _FIRST_CONTACT_S
        store.reach(retry_s=retry_s, least_stores=config.least_stores)
        until_s = time.monotonic() + 2 * lease_s
        store.require_token()  # with another token the run's records are unreadable
        while True:
            view = store.view(BOOTSTRAP_ROUND)
            waits = view.committed is None and (view.is_settling or config.resume is None)
            if not waits or time.monotonic() > until_s:
                return view.committed
            if store.has_several:
                store.follow()
            time.sleep(_LOOK_S)


def _has_saved(held: str, config: RunConfig, node_id: str) -> bool:
    """Whether there are checkpoints of this session, or of a run that itself continued from one."""
    if config.ckpt.path is None:
        return False
    storage = open_storage(config.ckpt.path, config.run.id, node_id)
    try:
        owner, steps = read_owner(storage), steps_in_order(storage)
        if not steps:
            return False
        if owner is not None and owner.session == held:
            return True
        record = open_checkpoint(storage, steps[0]).manifest.stamp.record
        return Progress.from_record(record["progress"]).follows is not None
    except OSError as error:
        raise ConfigError(f"ckpt.path: cannot read {storage.url}: {reason_of(error)}") from error
    except CheckpointDamaged:
        return False
