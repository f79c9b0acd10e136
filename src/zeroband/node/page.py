"""Serves a run's page: `zeroband board` in a child process that ends with its owner; its failures never affect the run.

Nodes that share a run's folder share one page: the node that holds the folder's lock serves it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from zeroband.config.schema import RunConfig
from zeroband.errors import ConfigError, way_to_extra
from zeroband.node.processes import start_child
from zeroband.observe.log import get_logger
from zeroband.observe.words import typed

PAGE_LOG = "board.log"
"""Log file of the page's process."""

_PROGRAM = ("-m", "zeroband.cli", "board")
_NEEDED = ("starlette", "uvicorn", "youplot")

_PORTS = 8
"""Ports to try from the requested one; then any."""
_LOOK_S = 1.0
_END_S = 3.0

_log = get_logger(__name__)


class _Served(Exception):
    """Another process serves this folder's page."""


def open_page(run_dir: Path, folder: Path, *, port: int, stack: ExitStack) -> str | None:
    """Serve a run's page on this machine until `stack` closes or this thread ends; returns its address.

    Returns None with a warning on any failure. If the port is taken, uses one of the next, or any. The page's output
    goes to `folder`.
    """
    try:
        return _serve(run_dir, folder, port=port, stack=stack, config=None)
    except _Served:
        _warn("another process serves it", typed("board", run_dir))
        return None


class SharedPage:
    """The page of a node's run, served by this node unless another node that shares the folder does.

    Shows the folder's files and, if the run has a store, the records of nodes elsewhere. A thread checks every second
    whether the other node still serves it; `close()` ends the thread and the page.
    """

    def __init__(self, config: RunConfig, node_dir: Path) -> None:
        self._config = config
        self._node_dir = node_dir
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._share, name="page", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=2 * _END_S)

    def _share(self) -> None:
        config, folder = self._config, self._node_dir
        with ExitStack() as stack:
            while not self._closing.is_set():
                try:
                    port = config.observe.board_port
                    address = _serve(folder.parent, folder, port=port, stack=stack, config=config)
                except _Served:
                    self._closing.wait(_LOOK_S)
                    continue
                if address is not None:
                    _log.info(f"the page of this run is at {address}, on {socket.gethostname()}")
                self._closing.wait()


def _serve(run_dir: Path, folder: Path, *, port: int, stack: ExitStack, config: RunConfig | None) -> str | None:
    """Start the page; returns None with a warning on failure. Raises _Served."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        _warn(f"{', '.join(missing)} is not installed", way_to_extra("board"))
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(run_dir)
        stack.callback(os.close, lock)
        with _listen(port) as listener:
            process = start_child(
                [*_command(run_dir, config), "--fd", str(listener.fileno())],
                env=_environment(config),
                output=folder / PAGE_LOG,
                death_signal=signal.SIGTERM,
                pass_fds=(listener.fileno(), lock),  # the child keeps the lock until it has released the port
            )
            address = f"http://localhost:{listener.getsockname()[1]}"
    except (ConfigError, OSError) as error:
        _warn(str(error), typed("board", run_dir))
        return None
    stack.callback(_end, process)
    return address


def _lock(run_dir: Path) -> int:
    """Lock the folder until the returned descriptor and its copies are closed. Raises _Served, OSError."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise _Served from None
    except OSError:  # some network file systems have no locks
        pass
    return descriptor


def _listen(port: int) -> socket.socket:
    """Listen on this port of the loopback address, one of the next, or any. Raises OSError."""
    for candidate in range(port, min(port + _PORTS, 1 << 16)):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", candidate))
    return socket.create_server(("127.0.0.1", 0))


def _command(run_dir: Path, config: RunConfig | None) -> list[str]:
    also_from_store = [] if config is None or config.store.address is None else ["--run-id", run_dir.name]
    return [sys.executable, *_PROGRAM, str(run_dir), *also_from_store]


def _environment(config: RunConfig | None) -> Mapping[str, str]:
    """Return this process's environment with the run's store and token, which every user could see in arguments."""
    env = dict(os.environ)
    if config is None or config.store.address is None:
        return env
    env["ZERO_BAND_STORE__URL"] = config.store.address
    for name in ("ZERO_BAND_RUN__TOKEN", "ZERO_BAND_RUN__TOKEN_FILE", "ZERO_BAND_STORE__PEERS"):
        env.pop(name, None)
    if config.run.token_file is not None:
        env["ZERO_BAND_RUN__TOKEN_FILE"] = str(config.run.token_file)
    elif config.run.token is not None:
        env["ZERO_BAND_RUN__TOKEN"] = config.run.token.get_secret_value()
    return env


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, with SIGKILL if needed, and reap it."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _warn(why: str, way_out: str) -> None:
    _log.warning("this run has no page", extra={"fields": {"why": why, "way_out": way_out}})
