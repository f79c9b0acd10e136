"""The page beside a run: it ends with its owner, and where it cannot be the run goes on without it."""

from __future__ import annotations

import signal
import socket
import subprocess
from contextlib import ExitStack
from pathlib import Path

import pytest

from zeroband.errors import way_to_extra
from zeroband.node import page


def test_taken_port_leaves_the_run_without_a_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert page.open_page(tmp_path, tmp_path, port=port, stack=stack) is None
    assert [record.message for record in caplog.records] == ["no page beside this run"]
    assert not (tmp_path / page.PAGE_LOG).exists()


def test_missing_packages_leave_the_run_without_a_page(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with ExitStack() as stack:
        assert page.open_page(tmp_path, tmp_path, port=8420, stack=stack) is None
    assert caplog.records[0].fields["way_out"] == way_to_extra("board")  # type: ignore[attr-defined]


def test_page_is_served_until_its_owner_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []
    children: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **_: object) -> subprocess.Popen[bytes]:
        started.append(command)
        children.append(subprocess.Popen(["sleep", "60"]))
        return children[-1]

    monkeypatch.setattr(page, "start_leashed", start)
    with ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = page.open_page(tmp_path, tmp_path, port=port, stack=stack, takes_another=True)
        assert address == f"http://localhost:{started[0][-1]}"
        assert address != f"http://localhost:{port}"
        assert children[0].poll() is None
    assert children[0].returncode == -signal.SIGTERM
    assert started[0][1:4] == ["-m", "zeroband.tools.board", str(tmp_path)]
