"""`zeroband store`: serve the store of a run and print the settings for its machines.

Prints three lines to type on each machine: address with password, run.id, run.token. Runs until Ctrl-C or SIGTERM, or
until the COMMAND after `--` ends, which gets them in its environment. Only the token is kept, in a file: restarted with
that file it prints the same lines, and a run survives a store that restarts empty.
Exit codes: 0 ended, that of the COMMAND, 2 wrong arguments or the server cannot start.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from zeroband.config.section import NAME_PATTERN
from zeroband.config.store_url import place_of
from zeroband.config.token_file import read_token
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.local_server import RedisServer, bounds_of_run, find_redis_server, outdated
from zeroband.errors import ConfigError
from zeroband.node.names import AUTO
from zeroband.tools.arguments import ID_VARIABLE, STORE_VARIABLE, TOKEN_VARIABLE, bounded, parser_of, run_command

_LEAST_TOKEN = 16
_LOOK_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Serve until a signal or the command's end. Returns the exit code."""
    options = _parser().parse_args(argv)
    return run_command("store", lambda: _serve(options))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "store",
        "Serve the store of a run, and print the lines to type on each of its machines.\n"
        "Only the token is kept: nodes restore what a restarted store lost.",
        usage="zeroband store [--host HOST] [--port PORT] [--run-id ID] [--token-file FILE] [-- COMMAND ...]",
        epilog="example: zeroband store --host 10.0.0.1 --run-id first",
    )
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address or name of this machine for the others; default: %(default)s, for nodes on this machine only",
    )
    add("--port", type=bounded(int, ge=1, le=65535), default=6379, help="default: %(default)s")
    add("--run-id", default=os.environ.get(ID_VARIABLE, "default"), metavar="ID", help="default: %(default)s")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with run.token, created with a new one if missing; default: "
        f"{TOKEN_VARIABLE}, {TOKEN_VARIABLE}_FILE, or run.token in this folder",
    )
    add("command", nargs="*", metavar="COMMAND", help="run this with the settings in its environment, and end with it")
    return parser


def _serve(options: argparse.Namespace) -> int:
    """Raises ConfigError."""
    run_id: str = options.run_id
    if run_id == AUTO:
        raise ConfigError(f"--run-id {AUTO}: name the run; all of its machines need the same name")
    if not re.fullmatch(NAME_PATTERN, run_id):
        raise ConfigError(f"--run-id {run_id!r}: a name is 1 to 64 letters, digits, dots, dashes and underscores")
    token, kept = _token(options.token_file, os.environ)
    asked: list[int] = []  # not an Event: its lock may be held by the main thread when a handler wants it
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _frame: asked.append(number))
    try:
        password = RunKey.of(token, run_id).store_password
        bounds = bounds_of_run(run_id, members=0)
        if old := outdated(find_redis_server()):
            print(f"zeroband store: {old}", file=sys.stderr)
        with RedisServer(host=_bound(options.host), port=options.port, password=password, bounds=bounds) as server:
            url = f"redis://:{password}@{place_of(options.host, options.port)}"
            needed = {STORE_VARIABLE: url, ID_VARIABLE: run_id, TOKEN_VARIABLE: token}
            if options.command:
                return _run(options.command, needed, server, asked)
            print(f"zeroband store: serving until Ctrl-C; {kept}; on every machine of the run, type", file=sys.stderr)
            print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in needed.items()), flush=True)
            while not asked:
                _require_running(server)
                time.sleep(_LOOK_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _bound(host: str) -> str:
    """Return the address to listen on: all for a name, which often resolves to loopback on its own machine.

    Raises ConfigError for an unspecified address.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "* -::*"
    if address.is_unspecified:
        raise ConfigError(f"--host {host} is not an address that other machines can reach; give this machine's")
    return host


def _run(command: Sequence[str], needed: Mapping[str, str], server: RedisServer, asked: Sequence[int]) -> int:
    """Run a command that needs the store and forward signals to it. Returns its exit code.

    `asked`: signals received before its start.
    """
    env = {name: value for name, value in os.environ.items() if name != f"{TOKEN_VARIABLE}_FILE"}
    try:
        started = subprocess.Popen(command, env={**env, **needed})
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _frame: started.send_signal(number))
    signal.signal(signal.SIGINT, lambda _number, _frame: None)  # the terminal sends Ctrl-C to the command as well
    if asked:
        started.terminate()
    while True:
        try:
            code = started.wait(_LOOK_S)
            return code if code >= 0 else 128 - code
        except subprocess.TimeoutExpired:
            if not server.is_running:
                started.terminate()
                started.wait()
                _require_running(server)


def _require_running(server: RedisServer) -> None:
    if not server.is_running:
        raise ConfigError(f"the server exited; its output: {server.log_text}")


def _token(path: Path | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the run's token and a note on where it is kept. Raises ConfigError."""
    if path is None and TOKEN_VARIABLE in environ:
        token, kept = environ[TOKEN_VARIABLE], f"the token is that of {TOKEN_VARIABLE}"
    else:
        path = path or Path(environ.get(f"{TOKEN_VARIABLE}_FILE") or "run.token")
        try:
            if not path.exists():
                _make_token(path)
        except OSError as error:
            raise ConfigError(f"--token-file {path}: {error.strerror}; name one in a folder of this user's") from error
        token, kept = read_token(path).get_secret_value(), f"the token is kept in {path}"
    if len(token) < _LEAST_TOKEN:
        raise ConfigError(f"run.token has only {len(token)} characters; use {_LEAST_TOKEN} or more")
    return token, kept


def _make_token(path: Path) -> None:
    """Create a file with a new token atomically, unless another process does first. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # of mode 600
        file.write(f"{secrets.token_hex(32)}\n")
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)
