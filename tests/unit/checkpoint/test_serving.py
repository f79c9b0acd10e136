import http.client
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.checkpoint import serving
from zeroband.checkpoint.recovery import Donor, fetch_entry, fetch_state
from zeroband.checkpoint.serving import HASH_HEADER, StateServer, access_key, chunk_hash
from zeroband.errors import RecoveryFailed

KEY = access_key("secret", "run")


@dataclass(frozen=True)
class Copy:
    round: int = 7
    sections: dict[str, Tensor] = field(default_factory=lambda: {"params": torch.arange(1000.0)})
    payload: dict[str, Any] = field(default_factory=dict)
    state: str = "digest"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StateServer]:
    monkeypatch.setattr(serving, "CHUNK_BYTES", 1024)
    server = StateServer("127.0.0.1", KEY, Copy, lambda round: None)
    yield server
    server.close()


def get(server: StateServer, path: str, authorization: str | None = f"Bearer {KEY}") -> tuple[int, bytes, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    connection.request("GET", path, headers={} if authorization is None else {"Authorization": authorization})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body, answer.headers[HASH_HEADER]


@pytest.mark.parametrize("path", ["/state", "/chunk/7/params/0", "/journal/1", "/"])
@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer ", "Bearer wrong", KEY[:-1], f"Bearer {access_key('other', 'run')}", "Bearer \xe9"],
)
def test_nothing_is_served_without_the_key(server: StateServer, path: str, authorization: str | None) -> None:
    assert get(server, path, authorization) == (403, b"", None)


def test_joiner_with_the_wrong_token_is_refused_everywhere(server: StateServer) -> None:
    donors, wrong = [Donor("honest", "127.0.0.1", server.port)], access_key("guessed", "run")
    with pytest.raises(RecoveryFailed, match=r"honest at .*/state answered 403"):
        fetch_state(donors, wrong, {"params": torch.zeros(1000)}, lambda done, total: None)
    with pytest.raises(RecoveryFailed, match=r"/journal/1 answered 403"):
        fetch_entry(donors, wrong, 1)


def test_key_depends_on_token_and_run_and_does_not_show_the_token() -> None:
    keys = {
        access_key("secret", "run"),
        access_key("secret", "run2"),
        access_key("secret2", "run"),
        access_key(None, "run"),
    }
    assert len(keys) == 4
    assert all("secret" not in key for key in keys)


@pytest.mark.parametrize("path", ["/", "/nothing", "/../../etc/passwd", "/journal/1", "/journal/x"])
def test_what_is_not_there_is_not_found(server: StateServer, path: str) -> None:
    assert get(server, path) == (404, b"", None)


@pytest.mark.parametrize("path", ["8/params/0", "7/other/0", "7/params", "x/params/0", "7/params/-1"])
def test_chunk_that_is_not_of_the_copy_is_not_found(server: StateServer, path: str) -> None:
    get(server, "/state")
    assert get(server, f"/chunk/{path}") == (404, b"", None)


def test_chunk_carries_its_hash_and_is_cut_at_the_end(server: StateServer) -> None:
    get(server, "/state")
    data = torch.arange(1000.0).numpy().tobytes()
    assert get(server, "/chunk/7/params/0") == (200, data[:1024], chunk_hash(data[:1024]))
    assert get(server, "/chunk/7/params/3") == (200, data[3072:], chunk_hash(data[3072:]))


def test_copy_is_made_when_it_is_asked_for_and_not_before(server: StateServer) -> None:
    assert get(server, "/chunk/7/params/0")[0] == 404
    get(server, "/state")
    assert get(server, "/chunk/7/params/0")[0] == 200


def test_copy_that_nobody_asks_for_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(serving.time, "monotonic", lambda: now_s)
    copies = serving._Copies(Copy)
    copies.fresh()
    now_s += serving.COPY_LIFE_S
    copies.drop_unused()
    assert copies.of_round(7) is not None
    now_s += serving.COPY_LIFE_S + 1
    copies.drop_unused()
    assert copies.of_round(7) is None


def test_at_most_two_copies_are_kept() -> None:
    rounds = iter(range(3, 9))
    copies = serving._Copies(lambda: Copy(next(rounds)))
    for _ in range(6):
        copies.fresh()
    assert [round for round in range(10) if copies.of_round(round)] == [7, 8]


def test_joiner_that_breaks_off_is_no_traceback_on_the_donors_console(
    server: StateServer, capfd: pytest.CaptureFixture[str]
) -> None:
    request = f"GET /state HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    for sent in (request * 200, b"GET /sta"):
        with socket.create_connection(("127.0.0.1", server.port)) as joiner:
            joiner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by reset
            joiner.sendall(sent)
    assert get(server, "/state")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_closed_server_refuses_connections(server: StateServer) -> None:
    server.close()
    with pytest.raises(ConnectionRefusedError):
        get(server, "/state")
