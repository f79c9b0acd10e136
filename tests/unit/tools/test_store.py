"""`zeroband store` serves a run and prints what its machines type, until it is told to end."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError
from tests.stores import free_port

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.tools.store import main

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def start_one(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        program = "import sys; from zeroband.cli import main; sys.exit(main(['store', *sys.argv[1:]]))"
        command = [sys.executable, "-c", program, "--port", str(free_port()), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "cwd": tmp_path}
        started.append(subprocess.Popen(command, text=True, env={**os.environ, **(env or {})}, **pipes))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def printed(process: subprocess.Popen[str]) -> dict[str, str]:
    """What a shell has set that was typed the lines that the store printed."""
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    words = [word for line in lines for word in shlex.split(line) if word != "export"]
    assert len(words) == 3 and all(line.startswith("export ") for line in lines), process.communicate()
    return dict(word.split("=", 1) for word in words)


@pytest.mark.slow
def test_store_serves_a_run_to_who_typed_its_lines_until_ctrl_c(start: Start) -> None:
    process = start("--run-id", "first")
    typed = printed(process)
    url, token = typed["ZERO_BAND_STORE__URL"], typed["ZERO_BAND_RUN__TOKEN"]
    assert typed["ZERO_BAND_RUN__ID"] == "first" and len(token) == 64
    store = RedisStore(url, "first", key=RunKey.of(token, "first"), retry_s=5.0)
    assert store.found_or_match({"a": "1"})["a"] == "1"
    store.close()
    with redis.Redis.from_url(url, protocol=2) as member:
        for command in ("CONFIG SET maxmemory 1", "SHUTDOWN NOSAVE", "GET zeroband:{second}:run"):
            with pytest.raises(NoPermissionError):
                member.execute_command(*command.split())
    with (
        redis.Redis.from_url(re.sub(r":[^:@/]+@", ":guessed@", url)) as other,
        pytest.raises(redis.AuthenticationError),
    ):
        other.ping()
    process.send_signal(signal.SIGINT)
    said, remarks = process.communicate(timeout=20)
    assert (said, process.returncode) == ("", 0) and "the token is kept in run.token" in remarks
    assert token not in remarks
    with redis.Redis.from_url(url) as gone, pytest.raises(redis.ConnectionError):
        gone.ping()


@pytest.mark.slow
def test_store_that_is_started_again_prints_the_same_lines(start: Start, tmp_path: Path) -> None:
    port = ("--port", str(free_port()))
    first = start(*port)
    lines = printed(first)
    first.terminate()
    assert first.wait(20) == 0
    assert printed(start(*port)) == lines
    token = tmp_path / "run.token"
    assert token.read_text().strip() == lines["ZERO_BAND_RUN__TOKEN"] and stat.S_IMODE(token.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [token]
    assert lines["ZERO_BAND_RUN__TOKEN"] not in lines["ZERO_BAND_STORE__URL"]


@pytest.mark.slow
def test_store_takes_the_token_that_is_there_already(start: Start, tmp_path: Path) -> None:
    lines = printed(start(env={"ZERO_BAND_RUN__TOKEN": "open sesame, says he", "ZERO_BAND_RUN__ID": "cave"}))
    assert (lines["ZERO_BAND_RUN__TOKEN"], lines["ZERO_BAND_RUN__ID"]) == ("open sesame, says he", "cave")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_command_gets_the_lines_in_its_environment_and_the_store_ends_with_it(start: Start, tmp_path: Path) -> None:
    program = """
import os, signal, redis
url = os.environ["ZERO_BAND_STORE__URL"]
redis.Redis.from_url(url, protocol=2).get("zeroband:{first}:run")
signal.signal(signal.SIGTERM, lambda *_: (print("asked to leave", flush=True), os._exit(75)))
print(url, os.environ["ZERO_BAND_RUN__ID"], "ZERO_BAND_RUN__TOKEN_FILE" in os.environ, flush=True)
signal.pause()
"""
    env = {"ZERO_BAND_RUN__TOKEN_FILE": str(tmp_path / "kept")}
    process = start("--run-id", "first", "--", sys.executable, "-c", program, env=env)
    assert process.stdout is not None
    url, *rest = process.stdout.readline().split()
    assert rest == ["first", "False"] and (tmp_path / "kept").exists()
    seen = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(secret in line for line in seen for secret in (url.encode(), (tmp_path / "kept").read_bytes()[:64]))
    process.terminate()
    assert process.communicate(timeout=20) == ("asked to leave\n", "") and process.returncode == 75
    with redis.Redis.from_url(url) as gone, pytest.raises(redis.ConnectionError):
        gone.ping()


@pytest.mark.slow
def test_server_that_is_killed_is_told(start: Start) -> None:
    process = start()
    printed(process)
    (server,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(server), signal.SIGKILL)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 2 and "the server exited" in said


@pytest.mark.usefixtures("own_folder")
def test_what_cannot_be_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], redis_port_taken: int) -> None:
    (tmp_path / "short").write_text("guess me\n")
    (tmp_path / "short").chmod(0o600)
    for arguments, said in [
        (["--token-file", "short"], "only 8 characters"),
        (["--token-file", "."], "run.token_file='.' cannot be read: Is a directory"),
        (["--token-file", "none/token"], "none/token: No such file or directory; name one in a folder"),
        (["--run-id", "a b"], "--run-id 'a b': a name is"),
        (["--run-id", "auto"], "name the run"),
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is not an address that other machines can reach"),
        (["--port", str(redis_port_taken)], "Address already in use"),
        (["--port", str(free_port()), "--", "no-such-program"], "cannot run no-such-program"),
    ]:
        assert main(arguments) == 2
        assert said in capsys.readouterr().err


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def redis_port_taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])
