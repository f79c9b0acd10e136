"""The page of a run beside its processes: `zeroband board` as a child that ends with its owner and fails alone."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

from zeroband.errors import ConfigError, way_to_extra
from zeroband.node.processes import start_leashed
from zeroband.observe.log import get_logger

PAGE_LOG = "board.log"
"""Name of the file with the page's output, inside the folder of who starts it."""

_MODULE = "zeroband.tools.board"
_NEEDED = ("starlette", "uvicorn", "youplot")

_END_S = 3.0

_log = get_logger(__name__)


def open_page(run_dir: Path, folder: Path, *, port: int, stack: ExitStack, takes_another: bool = False) -> str | None:
    """Serve the page of a run on this machine until `stack` closes or this thread ends; its address.

    None, and a warning, where it cannot be: it is never the run's failure. `takes_another`: a port that is free where
    this one is taken. Its output goes to `folder`.
    """
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        _warn(f"{', '.join(missing)} is not installed", way_to_extra("board"))
        return None
    try:
        port = _free_port(port, takes_another=takes_another)
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", _MODULE, str(run_dir), "--port", str(port)]
        process = start_leashed(command, env=os.environ, output=folder / PAGE_LOG, death_signal=signal.SIGTERM)
    except (ConfigError, OSError) as error:
        _warn(str(error), f"zeroband board {run_dir}")
        return None
    stack.callback(_end, process)
    return f"http://localhost:{port}"


def _free_port(port: int, *, takes_another: bool) -> int:
    """Raises OSError where the port is taken and no other will do."""
    try:
        with socket.create_server(("127.0.0.1", port)):
            return port
    except OSError:
        if not takes_another:
            raise
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return probe.getsockname()[1]


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have it end, so that nothing of it is left."""
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _warn(why: str, way_out: str) -> None:
    _log.warning("no page beside this run", extra={"fields": {"why": why, "way_out": way_out}})
