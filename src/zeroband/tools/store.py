"""`zeroband store`: the store of a run, from a machine that every node reaches, without a Redis of one's own to set up.

Runs until Ctrl-C or SIGTERM, and keeps nothing on disk: a run outlasts a store that comes back empty at its address.
Exit codes: 0 ended, 2 the arguments are wrong, or no server can be started.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from zeroband.elastic.store.local_server import RedisServer
from zeroband.errors import ConfigError

_EXIT_CONFIG = 2
_LEAST_PASSWORD = 16
_LOOK_S = 1.0


def main(argv: Sequence[str]) -> int:
    """Serve until somebody ends it. Returns the exit code."""
    options = _parser().parse_args(argv)
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: ending.set())
    try:
        password = _password(options.password_file)
        with RedisServer(host=options.host, port=options.port, password=password) as server:
            print("zeroband store: serves until Ctrl-C; on every node:")
            print(f"export ZERO_BAND_STORE__URL={server.url}", flush=True)
            while not ending.wait(_LOOK_S):
                if not server.is_running:
                    raise ConfigError(f"the server ended by itself; it said: {server.said}")
    except ConfigError as error:
        print(f"zeroband store: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroband store",
        description="Serve as the store of a run until Ctrl-C. Keeps nothing on disk: nodes bring back what it forgot.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on, by which the nodes reach this machine; default: %(default)s, for nodes on it alone",
    )
    parser.add_argument("--port", type=int, default=6379, help="default: %(default)s")
    parser.add_argument(
        "--password-file",
        type=Path,
        help="holds the password, and is made with a new one where it does not exist; default: a new one each time",
    )
    return parser


def _password(path: Path | None) -> str:
    """The password of the store. Raises ConfigError."""
    new = secrets.token_urlsafe(24)
    if path is None:
        return new
    try:
        with suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(new)
        found = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--password-file {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(found) < _LEAST_PASSWORD:
        raise ConfigError(f"--password-file {path}: {len(found)} letters can be guessed; use {_LEAST_PASSWORD} or more")
    return found
