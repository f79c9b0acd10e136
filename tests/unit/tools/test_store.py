"""`zeroband store` serves a run with a password, until it is told to end."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from zeroband.elastic.store.redis_store import RedisStore
from zeroband.tools.store import main

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str) -> subprocess.Popen[str]:
        program = "import sys; from zeroband.cli import main; sys.exit(main(['store', *sys.argv[1:]]))"
        command = [sys.executable, "-c", program, "--port", str(free_port()), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(command, text=True, **pipes))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    process.stdout.readline()
    found = re.fullmatch(r"export ZERO_BAND_STORE__URL=(redis://\S+)\n", process.stdout.readline())
    assert found, process.communicate()
    return found[1]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_store_serves_a_run_to_who_has_its_password_until_it_is_ended(start: Start, number: int) -> None:
    process = start()
    url = address(process)
    store = RedisStore(url, "run", patience_s=5.0)
    assert store.found_or_match({"a": "1"})["a"] == "1"
    store.close()
    with (
        redis.Redis.from_url(re.sub(r":[^:@/]+@", ":guessed@", url)) as other,
        pytest.raises(redis.AuthenticationError),
    ):
        other.ping()
    process.send_signal(number)
    assert process.communicate(timeout=20) == ("", "") and process.returncode == 0
    with redis.Redis.from_url(url) as gone, pytest.raises(redis.ConnectionError):
        gone.ping()


@pytest.mark.slow
def test_password_is_kept_where_only_its_user_reads_it(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "password"
    urls = [address(start("--password-file", str(path))) for _ in range(2)]
    assert all(f":{path.read_text()}@" in url for url in urls) and stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len(path.read_text()) >= 32


@pytest.mark.slow
def test_server_that_is_killed_is_told(start: Start) -> None:
    process = start()
    with redis.Redis.from_url(address(process)) as client:
        os.kill(int(client.info("server")["process_id"]), signal.SIGKILL)  # type: ignore[index]
    _, said = process.communicate(timeout=20)
    assert process.returncode == 2 and "the server ended by itself" in said


def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], redis_port_taken: int) -> None:
    (tmp_path / "short").write_text("guess me\n")
    assert main(["--password-file", str(tmp_path / "short")]) == 2
    assert "8 letters can be guessed" in capsys.readouterr().err
    assert main(["--password-file", str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err
    assert main(["--port", str(redis_port_taken)]) == 2
    assert "Address already in use" in capsys.readouterr().err


@pytest.fixture
def redis_port_taken() -> Iterator[int]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])
    for number, handler in before.items():
        signal.signal(number, handler)
