"""The page beside a run: one for all who share its folder, which ends with its owner; without it the run goes on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.servers import until
from tests.stores import free_port

from zeroband.config import RunConfig, load_config
from zeroband.errors import ConfigError, way_to_extra
from zeroband.node import page


@dataclass
class Started:
    """A child in place of the page, and how it was started."""

    command: list[str]
    env: dict[str, str]
    port: int
    """Where the socket listens that it got."""
    process: subprocess.Popen[bytes]


@dataclass
class Children:
    started: list[Started] = field(default_factory=list[Started])

    def start(self, command: list[str], *, env: dict[str, str], pass_fds: tuple[int, ...], **_: Any) -> Any:
        with socket.socket(fileno=os.dup(int(command[-1]))) as listener:
            port = listener.getsockname()[1]
        process = subprocess.Popen(["sleep", "60"], pass_fds=pass_fds)
        self.started.append(Started(command, env, port, process))
        return process


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Started]]:
    made = Children()
    monkeypatch.setattr(page, "start_child", made.start)
    yield made.started
    for one in made.started:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., page.SharedPage]]:
    """Share the page of the run in tmp_path/run as a node that is started with these arguments."""
    monkeypatch.setattr(page, "_LOOK_S", 0.01)
    with ExitStack() as stack:

        def one(node_id: str, *arguments: str) -> page.SharedPage:
            (node_dir := tmp_path / "run" / node_id).mkdir(parents=True)
            shared = page.SharedPage(config_of(*arguments), node_dir)
            stack.callback(shared.close)
            return shared

        yield one


def config_of(*arguments: str) -> RunConfig:
    return load_config([*(arguments or [f"--observe.board-port={free_port()}"])], {})


def test_address_is_that_of_the_socket_which_the_page_gets(tmp_path: Path, children: list[Started]) -> None:
    port = free_port()
    with ExitStack() as stack:
        assert page.open_page(tmp_path, tmp_path, port=port, stack=stack) == f"http://localhost:{port}"
        assert [one.port for one in children] == [port]
        assert children[0].command[1:5] == ["-m", "zeroband.cli", "board", str(tmp_path)]


def test_page_is_elsewhere_where_the_port_is_taken(tmp_path: Path, children: list[Started]) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = page.open_page(tmp_path, tmp_path, port=port, stack=stack)
        assert address == f"http://localhost:{children[0].port}" != f"http://localhost:{port}"


def test_missing_packages_leave_the_run_without_a_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with ExitStack() as stack:
        assert page.open_page(tmp_path, tmp_path, port=8420, stack=stack) is None
    assert caplog.records[0].fields["way_out"] == way_to_extra("board")  # type: ignore[attr-defined]


@pytest.mark.parametrize("error", [ConfigError("this needs Linux"), OSError("no memory")])
def test_page_that_cannot_start_leaves_the_run_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(page, "start_child", fail)
    with ExitStack() as stack:
        assert page.open_page(tmp_path, tmp_path, port=8420, stack=stack) is None
    assert [record.message for record in caplog.records] == ["this run has no page"]


def test_those_who_share_a_folder_have_one_page_and_the_next_one_takes_it_over(
    children: list[Started], share: Callable[..., page.SharedPage], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = share("a")
    until(lambda: len(children) == 1, "the page of a")
    second = share("b", f"--observe.board-port={children[0].port}")
    with ExitStack() as stack:
        assert page.open_page(tmp_path / "run", tmp_path, port=8420, stack=stack) is None
    assert caplog.records[-1].fields["why"] == "another process serves it"  # type: ignore[attr-defined]
    assert len(children) == 1
    first.close()
    until(lambda: len(children) == 2, "the page of b")
    assert children[0].process.returncode == -signal.SIGTERM
    assert children[1].port == children[0].port
    second.close()
    assert children[1].process.returncode == -signal.SIGTERM


def test_page_that_outlives_its_owner_for_a_moment_is_the_only_one(
    tmp_path: Path, children: list[Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who came before its end would find the port taken, and have another address."""
    monkeypatch.setattr(page, "_end", lambda process: None)  # its owner was killed
    port = free_port()
    with ExitStack() as stack:
        page.open_page(tmp_path, tmp_path, port=port, stack=stack)
    with ExitStack() as stack:
        assert page.open_page(tmp_path, tmp_path, port=port, stack=stack) is None
        children[0].process.kill()
        children[0].process.wait()
        assert page.open_page(tmp_path, tmp_path, port=port, stack=stack) == f"http://localhost:{port}"


def test_run_with_a_store_is_read_from_there_too_and_no_secret_is_on_the_command_line(
    children: list[Started], share: Callable[..., page.SharedPage], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_BAND_RUN__TOKEN_FILE", "/of/another/run")
    share("a", "--outer.type=ddp", "--store.url=redis://:passw0rd@localhost:1", "--run.id=run", "--run.token=s3cret")
    until(lambda: len(children) == 1, "the page")
    (one,) = children
    assert one.command[5:7] == ["--run-id", "run"]
    assert not any(secret in argument for argument in one.command for secret in ("passw0rd", "s3cret"))
    names = ("ZERO_BAND_STORE__URL", "ZERO_BAND_RUN__TOKEN", "ZERO_BAND_RUN__TOKEN_FILE")
    assert [one.env.get(name) for name in names] == ["redis://:passw0rd@localhost:1", "s3cret", None]


def test_token_of_a_file_is_passed_on_as_that_file(
    children: list[Started], share: Callable[..., page.SharedPage], tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    (tmp_path / "token").chmod(0o600)
    share("a", "--outer.type=ddp", "--store.url=redis://localhost:1", f"--run.token-file={tmp_path / 'token'}")
    until(lambda: len(children) == 1, "the page")
    assert children[0].env["ZERO_BAND_RUN__TOKEN_FILE"] == str(tmp_path / "token")
    assert "s3cret" not in children[0].env.values()
