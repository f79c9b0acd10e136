import http.client
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.door import OpenServer
from torch import Tensor

from zeroband.checkpoint import serving
from zeroband.checkpoint.chunks import chunk_hash, parse_manifest
from zeroband.checkpoint.recovery import Donor, StateFetch, fetch_entry
from zeroband.checkpoint.serving import access_key
from zeroband.errors import RecoveryFailed

KEY = access_key("secret", "run")
DATA = torch.arange(1000.0).numpy().tobytes()


@dataclass(frozen=True)
class Copy:
    round: int = 7
    sections: dict[str, Tensor] = field(default_factory=lambda: {"params": torch.arange(1000.0)})
    payload: dict[str, Any] = field(default_factory=dict)
    state: str = "digest"


@dataclass(frozen=True)
class Entry:
    round: int = 4
    result: Tensor = field(default_factory=lambda: torch.arange(1000.0))
    payload: dict[str, Any] = field(default_factory=dict)
    state: str = "digest"


@pytest.fixture
def server() -> Iterator[OpenServer]:
    server = OpenServer(
        KEY,
        Copy,
        lambda round: Entry() if round == 4 else None,
        current_round=lambda: 7,
        chunk_bytes=1024,
    )
    yield server
    server.close()


def get(server: OpenServer, path: str, authorization: str | None = f"Bearer {KEY}") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


@pytest.mark.parametrize("path", ["/state", "/state/7", "/state/7/params/0", "/journal/4", "/journal/4/result/0", "/"])
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer ", "Bearer wrong", KEY[:-1], f"Bearer {access_key('other', 'run')}", "Bearer \xe9"],
)
@pytest.mark.defect(11)
def test_nothing_is_served_without_the_key(server: OpenServer, path: str, authorization: str | None) -> None:
    assert get(server, path, authorization) == (403, b"")


def test_joiner_with_the_wrong_token_is_refused_everywhere(server: OpenServer) -> None:
    donors, wrong = [Donor("honest", "127.0.0.1", server.port)], access_key("guessed", "run")
    with pytest.raises(RecoveryFailed, match=r"honest at .*/state answered 403"):
        StateFetch(wrong, {"params": torch.zeros(1000)}).fetch(donors)
    with pytest.raises(RecoveryFailed, match=r"/journal/4 answered 403"):
        fetch_entry(donors, wrong, 4)


def test_key_depends_on_token_and_run_and_does_not_show_the_token() -> None:
    keys = {
        access_key("secret", "run"),
        access_key("secret", "run2"),
        access_key("secret2", "run"),
        access_key(None, "run"),
    }
    assert len(keys) == 4
    assert all("secret" not in key for key in keys)


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/../../etc/passwd",
        "/state/6",
        "/state/" + "9" * 5000,
        "/state/7/params",
        "/state/7/params/4",
        "/state/7/params/-1",
        "/state/7/other/0",
        "/state/8/params/0",
        "/state/x/params/0",
        "/journal/1",
        "/journal/x",
        "/journal/1/result/0",
        "/journal/4/other/0",
        "/journal/4/result/4",
    ],
)
def test_what_is_not_there_is_not_found(server: OpenServer, path: str) -> None:
    get(server, "/state")
    assert get(server, path) == (404, b"")


@pytest.mark.parametrize(
    ("path", "section", "round"), [("/state", "params", 7), ("/state/7", "params", 7), ("/journal/4", "result", 4)]
)
def test_manifest_lists_the_hash_of_each_chunk(server: OpenServer, path: str, section: str, round: int) -> None:
    status, body = get(server, path)
    manifest = parse_manifest(body, {section: len(DATA)})
    assert (status, manifest.round, manifest.state) == (200, round, "digest")
    for index, listed in enumerate(manifest.hashes[section]):
        status, data = get(server, f"/{path.split('/')[1]}/{round}/{section}/{index}")
        assert (status, data) == (200, DATA[index * 1024 : (index + 1) * 1024])
        assert listed == chunk_hash(data)


def test_copy_is_made_when_it_is_asked_for_and_not_before(server: OpenServer) -> None:
    assert get(server, "/state/7/params/0")[0] == 404
    get(server, "/state")
    assert get(server, "/state/7/params/0")[0] == 200


def test_round_is_told_while_the_hashes_are_computed(server: OpenServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "HASHES_AWAITED_S", 0.01)
    with server._hasher._turn:
        status, body = get(server, "/state")
        assert (status, json.loads(body)) == (202, {"round": 7})
        assert get(server, "/state/7")[0] == 202
    monkeypatch.setattr(serving, "HASHES_AWAITED_S", 5.0)
    assert get(server, "/state/7")[0] == 200


def test_donor_that_cannot_make_a_copy_says_that_it_is_unavailable() -> None:
    def copy_state() -> Copy:
        raise RecoveryFailed("no step ended")

    server = OpenServer(KEY, copy_state, lambda round: None)
    assert get(server, "/state") == (503, b"")
    server.close()


def test_joiner_that_breaks_off_is_no_traceback_on_the_donors_console(
    server: OpenServer, capfd: pytest.CaptureFixture[str]
) -> None:
    request = f"GET /state HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    for sent in (request * 200, b"GET /sta"):
        with socket.create_connection(("127.0.0.1", server.port)) as joiner:
            joiner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by reset
            joiner.sendall(sent)
    assert get(server, "/state")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_closed_server_hangs_up_on_whoever_is_handed_over(server: OpenServer) -> None:
    server.close()
    ours, theirs = socket.socketpair()
    with ours:
        server.take(theirs)
        assert ours.recv(1) == b""


def test_closed_server_hangs_up_on_those_who_are_connected(server: OpenServer) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as joiner:
        joiner.sendall(f"GET / HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        assert joiner.recv(1)
        server.close()
        while joiner.recv(1 << 16):
            pass
