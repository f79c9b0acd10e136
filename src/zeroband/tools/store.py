"""`zeroband store`: the store of a run, and what every machine of the run needs to know of it.

Prints the three lines that are typed on each machine: address with password, run.id, run.token. Runs until Ctrl-C or
SIGTERM, or with a COMMAND behind `--`, which gets them in its environment, until that ends. Keeps the token in a file,
and nothing else: started again with that file it prints the same lines, and a run outlasts a store that comes back
empty. Exit codes: 0 ended, that of the COMMAND, 2 the arguments are wrong, or no server can be started.
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
from zeroband.node.run_names import AUTO
from zeroband.tools.arguments import ID_VARIABLE, STORE_VARIABLE, TOKEN_VARIABLE, bounded, parser_of, run_command

_LEAST_TOKEN = 16
_LOOK_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Serve until a signal ends it, or the command has ended. Returns the exit code."""
    options = _parser().parse_args(argv)
    return run_command("store", lambda: _serve(options))


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "store",
        "Serve as the store of a run, and print the lines that are typed on each of its machines.\n"
        "Keeps nothing but the token: nodes bring back what the store forgot.",
        usage="zeroband store [--host HOST] [--port PORT] [--run-id ID] [--token-file FILE] [-- COMMAND ...]",
        epilog="example: zeroband store --host 10.0.0.1 --run-id first",
    )
    add = parser.add_argument
    add(
        "--host",
        default="127.0.0.1",
        help="address or name under which the others reach this machine; default: %(default)s, for nodes on it alone",
    )
    add("--port", type=bounded(int, ge=1, le=65535), default=6379, help="default: %(default)s")
    add("--run-id", default=os.environ.get(ID_VARIABLE, "default"), metavar="ID", help="default: %(default)s")
    add(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="holds run.token, and is made with a new one where it does not exist; without it "
        f"{TOKEN_VARIABLE}, {TOKEN_VARIABLE}_FILE, or run.token in this folder",
    )
    add("command", nargs="*", metavar="COMMAND", help="run it with these in its environment, and end with it")
    return parser


def _serve(options: argparse.Namespace) -> int:
    """Raises ConfigError."""
    run_id: str = options.run_id
    if run_id == AUTO:
        raise ConfigError(f"--run-id {AUTO}: name the run, which all of its machines have to call the same")
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
            print(f"zeroband store: serves until Ctrl-C; {kept}; on every machine of the run, type", file=sys.stderr)
            print("\n".join(f"export {name}={shlex.quote(value)}" for name, value in needed.items()), flush=True)
            while not asked:
                _require_running(server)
                time.sleep(_LOOK_S)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _bound(host: str) -> str:
    """What the server listens on. A name often means an address of loopback on the machine that has it.

    Raises ConfigError for an address that means every machine to itself.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "* -::*"
    if address.is_unspecified:
        raise ConfigError(f"--host {host} is no address that other machines reach; give this machine's")
    return host


def _run(command: Sequence[str], needed: Mapping[str, str], server: RedisServer, asked: Sequence[int]) -> int:
    """Run a command that needs the store, and hand on what it is asked to do. Returns its exit code.

    `asked`: the signals that came before it was started.
    """
    env = {name: value for name, value in os.environ.items() if name != f"{TOKEN_VARIABLE}_FILE"}
    try:
        started = subprocess.Popen(command, env={**env, **needed})
    except OSError as error:
        raise ConfigError(f"cannot run {command[0]}: {error.strerror}") from error
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _frame: started.send_signal(number))
    signal.signal(signal.SIGINT, lambda _number, _frame: None)  # the terminal sends Ctrl-C to the command, too
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
        raise ConfigError(f"the server exited; it said: {server.said}")


def _token(path: Path | None, environ: Mapping[str, str]) -> tuple[str, str]:
    """The run's token, and where it is kept, for people. Raises ConfigError."""
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
        raise ConfigError(f"run.token has {len(token)} letters, which can be guessed; use {_LEAST_TOKEN} or more")
    return token, kept


def _make_token(path: Path) -> None:
    """Make a file with a new token, whole or not at all; another store may be faster. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # of mode 600
        file.write(f"{secrets.token_hex(32)}\n")
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)
