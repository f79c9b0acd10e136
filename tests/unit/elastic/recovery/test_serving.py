import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from tests.unit.elastic.recovery.open_server import DIALLER, WRONG_TOKEN, OpenServer, ask

from zeroband.elastic.recovery import serving
from zeroband.elastic.recovery.state_chunks import chunk_hash, parse_manifest
from zeroband.elastic.transport.handshake import NO_KEYS
from zeroband.errors import HandshakeFailed
from zeroband.state.round_state import RoundState, RoundUpdate

DATA = torch.arange(1000.0).numpy().tobytes()


STATE = RoundState(7, {}, "digest", {"params": torch.arange(1000.0)})
ENTRY = RoundUpdate(4, torch.arange(1000.0).view(torch.uint8), {}, "digest")


@pytest.fixture
def server() -> Iterator[OpenServer]:
    server = OpenServer(
        "honest",
        lambda: STATE,
        lambda round: ENTRY if round == 4 else None,
        current_round=lambda: 7,
        chunk_bytes=1024,
    )
    yield server
    server.close()


def get(server: OpenServer, path: str) -> tuple[int, bytes]:
    return ask(server.donor, path)


STRANGERS = {
    "another token": WRONG_TOKEN,
    "for another member": DIALLER,
    "in the clear": replace(DIALLER, is_sealed=False),
}


@pytest.mark.parametrize("stranger", STRANGERS)
@pytest.mark.defect(11)
def test_nothing_is_served_to_who_cannot_shake_hands(server: OpenServer, stranger: str) -> None:
    member_id = "another" if stranger == "for another member" else "honest"
    donor = replace(server.donor, member_id=member_id)
    with pytest.raises(HandshakeFailed, match=r"run\.token and comm\.encryption"):
        ask(donor, "/state", STRANGERS[stranger])
    assert get(server, "/state")[0] == 200


@pytest.mark.defect(11)
def test_nothing_is_served_without_a_handshake(server: OpenServer) -> None:
    with socket.create_connection((server.donor.host, server.donor.port), timeout=5) as stranger:
        stranger.sendall(b"GET /state HTTP/1.1\r\n\r\n".ljust(1000))
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""


NOT_THERE = (
    *("/", "/nothing", "/../../etc/passwd", "/state/6", "/state/" + "9" * 5000, "/state/7/params"),
    *("/state/7/params/4", "/state/7/params/-1", "/state/7/other/0", "/state/8/params/0", "/state/x/params/0"),
    *("/state/6/0", "/state/7/4", "/journal/1", "/journal/1/0", "/journal/4/4", "/journal/x"),
    *("/journal/1/update/0", "/journal/4/other/0", "/journal/4/update/4"),
)


def test_what_is_not_there_is_not_found(server: OpenServer) -> None:
    get(server, "/state")
    assert {path: get(server, path) for path in NOT_THERE} == dict.fromkeys(NOT_THERE, (404, b""))


@pytest.mark.parametrize(("path", "section", "round"), [("/state/7/0", "params", 7), ("/journal/4/0", "update", 4)])
def test_manifest_lists_the_hash_of_each_chunk(server: OpenServer, path: str, section: str, round: int) -> None:
    status, body = get(server, path)
    manifest = parse_manifest(body, {section: len(DATA)})
    assert (status, manifest.round, manifest.state_digest) == (200, round, "digest")
    for index, listed in enumerate(manifest.sections[section].hashes):
        status, data = get(server, f"/{path.split('/')[1]}/{round}/{section}/{index}")
        assert (status, data) == (200, DATA[index * 1024 : (index + 1) * 1024])
        assert listed == chunk_hash(data)


def test_round_is_told_without_hashes_and_a_manifest_when_these_are_there(
    server: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "HASHES_AWAITED_S", 0.01)
    go_on = threading.Event()
    monkeypatch.setattr(serving, "chunk_hash", lambda view: chunk_hash(view) if go_on.wait(10) else "")
    status, body = get(server, "/state")
    assert (status, json.loads(body)) == (200, {"round": 7})
    assert get(server, "/state/7/0") == (202, b"")
    go_on.set()
    monkeypatch.setattr(serving, "HASHES_AWAITED_S", 5.0)
    assert get(server, "/state/7/0")[0] == 200


@pytest.mark.parametrize("is_patient", [True, False])
def test_joiner_gets_some_bytes_now_and_then_while_a_round_needs_the_link(
    monkeypatch: pytest.MonkeyPatch, is_patient: bool
) -> None:
    monkeypatch.setattr(serving, "RECORD_BYTES", 250)
    monkeypatch.setattr(serving, "KEEPALIVE_BYTES", 125)
    monkeypatch.setattr(serving, "YIELD_S", 1000.0 if is_patient else 0.0)
    asked = list[bool]()

    def needs_link() -> bool:
        asked.append(not is_patient or len(asked) < 3)
        return asked[-1]

    server = OpenServer("honest", lambda: STATE, lambda round: ENTRY, current_round=lambda: 7, needs_link=needs_link)
    get(server, "/state")
    assert asked == []
    for path in ("/state/7/params/0", "/journal/4/update/0"):
        assert get(server, path) == (200, DATA)
    assert asked == ([True] * 3 + [False] * 32 if is_patient else [True] * 64)
    server.close()


def test_joiner_that_breaks_off_is_no_traceback_on_the_donors_console(
    server: OpenServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for sent in (b"GET /state HTTP/1.1\r\n\r\n" * 200, b"GET /sta"):
        joiner = DIALLER.dial("honest", server.donor.routes, 5.0)
        joiner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close by reset
        joiner.sendall(sent)
        joiner.close()
    assert get(server, "/state")[0] == 200
    assert capfd.readouterr() == ("", "")


def test_closed_server_hangs_up_on_whoever_is_handed_over(server: OpenServer) -> None:
    server.close()
    ours, theirs = socket.socketpair()
    with ours:
        server.take(theirs, NO_KEYS)
        assert ours.recv(1) == b""


def test_closed_server_hangs_up_on_those_who_are_connected(server: OpenServer) -> None:
    joiner = DIALLER.dial("honest", server.donor.routes, 5.0)
    joiner.settimeout(5)
    joiner.sendall(b"GET / HTTP/1.1\r\n\r\n")
    answers = joiner.makefile("rb")
    assert answers.read(1)
    server.close()
    with suppress(ConnectionAbortedError):
        while answers.read(1 << 16):
            pass
    joiner.close()
