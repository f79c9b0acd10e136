"""A donor and a joiner over loopback, and what stands between them when a donor is not to be trusted."""

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.checkpoint import recovery, serving
from zeroband.checkpoint.recovery import Donor, FetchedState, fetch_entry, fetch_state
from zeroband.checkpoint.serving import HASH_HEADER, StateServer, access_key, chunk_hash
from zeroband.errors import RecoveryFailed

KEY = access_key("secret", "run")
N = 1003


def values(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Copy:
    round: int = 7
    sections: dict[str, Tensor] = field(default_factory=lambda: {"params": values(1), "momentum": values(2)})
    payload: dict[str, Any] = field(default_factory=lambda: {"progress": {"inner_step": 70}, "weight": 30})
    state: str = "digest of 7"


@dataclass(frozen=True)
class Entry:
    round: int
    result: Tensor
    payload: dict[str, Any]
    state: str


def entry_of(round: int) -> Entry | None:
    return Entry(round, values(round), {"weight": round}, f"digest of {round}") if 3 <= round <= 7 else None


Serve = Callable[..., Donor]


@pytest.fixture
def stack(monkeypatch: pytest.MonkeyPatch) -> Iterator[ExitStack]:
    monkeypatch.setattr(serving, "CHUNK_BYTES", 1024)
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    """Start a member that serves a state and a journal."""

    def start(member_id: str = "honest", copy: Copy | None = None, journal: Callable[[int], Any] = entry_of) -> Donor:
        server = StateServer("127.0.0.1", KEY, lambda: copy or Copy(), journal)
        stack.callback(server.close)
        return Donor(member_id, "127.0.0.1", server.port)

    return start


Alter = Callable[[str, bytes], bytes]


@pytest.fixture
def interpose(stack: ExitStack, serve: Serve) -> Callable[..., Donor]:
    """Start a member whose answers pass through `alter(path, body)`; `is_consistent`: with their own hash."""

    def start(alter: Alter, *, is_consistent: bool = False, is_cut: bool = False) -> Donor:
        honest = serve()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                behind = http.client.HTTPConnection(honest.host, honest.port, timeout=5)
                behind.request("GET", self.path, headers=dict(self.headers))
                answer = behind.getresponse()
                body = answer.read()
                behind.close()
                altered = alter(self.path, body)
                self.send_response(answer.status)
                self.send_header("Content-Length", str(len(body if is_cut else altered)))
                self.send_header(HASH_HEADER, chunk_hash(altered) if is_consistent else answer.headers[HASH_HEADER])
                self.end_headers()
                self.wfile.write(altered)
                self.close_connection = len(altered) < len(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return Donor("liar", "127.0.0.1", server.server_address[1])

    return start


def fetch(*donors: Donor, key: str = KEY, n: int = N) -> tuple[FetchedState, dict[str, Tensor]]:
    sections = {"params": torch.zeros(n), "momentum": torch.zeros(n)}
    return fetch_state(donors, key, sections, lambda done, total: None), sections


def require_honest(fetched: FetchedState, sections: dict[str, Tensor]) -> None:
    assert (fetched.donor, fetched.round, fetched.state) == ("honest", 7, "digest of 7")
    assert torch.equal(sections["params"], values(1))
    assert torch.equal(sections["momentum"], values(2))


def test_fetched_state_is_the_donors_to_the_last_bit_with_what_belongs_to_it(serve: Serve) -> None:
    chunks: list[tuple[int, int]] = []
    sections = {"params": torch.zeros(N), "momentum": torch.zeros(N)}
    fetched = fetch_state([serve()], KEY, sections, lambda done, total: chunks.append((done, total)))
    require_honest(fetched, sections)
    assert fetched.payload == Copy().payload
    assert fetched.received_bytes == 2 * 4 * N
    assert sum(done for done, _ in chunks) == 2 * 4 * N
    assert {total for _, total in chunks} == {2 * 4 * N}
    assert len(chunks) == 2 * -(-4 * N // 1024)


def test_fetched_entry_is_the_donors(serve: Serve) -> None:
    entry = fetch_entry([serve()], KEY, 5)
    assert (entry.round, entry.payload, entry.state) == (5, {"weight": 5}, "digest of 5")
    assert torch.equal(entry.result, values(5))


def test_chunks_are_of_the_round_of_the_manifest_while_rounds_go_on(stack: ExitStack) -> None:
    rounds = iter(range(7, 100))

    def copy_state() -> Copy:
        round = next(rounds)
        return Copy(round, {"params": values(10 * round), "momentum": values(10 * round + 1)}, {}, f"digest of {round}")

    server = StateServer("127.0.0.1", KEY, copy_state, entry_of)
    stack.callback(server.close)
    donor = Donor("honest", "127.0.0.1", server.port)
    sections = {"params": torch.zeros(N), "momentum": torch.zeros(N)}
    asked: list[FetchedState] = []
    first = threading.Lock()

    def ask_once(done: int, total: int) -> None:
        if first.acquire(blocking=False):
            asked.append(fetch(donor)[0])  # another joiner, in the middle of this one

    fetched = fetch_state([donor], KEY, sections, ask_once)
    assert (fetched.round, asked[0].round) == (7, 8)
    assert torch.equal(sections["momentum"], values(71))


# -- donors that cannot serve ---------------------------------------------------------------------------------------


def flip(path: str, body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


def only(prefix: str, alter: Alter) -> Alter:
    return lambda path, body: alter(path, body) if path.startswith(prefix) else body


@pytest.mark.parametrize("path", ["/state", "/chunk/7/params/0", "/chunk/7/momentum/3"])
def test_flipped_bit_is_noticed_and_the_next_donor_taken(
    serve: Serve, interpose: Callable[..., Donor], path: str
) -> None:
    liar = interpose(only(path, flip))
    with pytest.raises(RecoveryFailed, match=f"liar at .*{path} does not match its hash"):
        fetch(liar)
    require_honest(*fetch(liar, serve()))


@pytest.mark.parametrize("path", ["/state", "/chunk/7/params/0", "/chunk/7/momentum/3"])
def test_answer_that_breaks_off_is_noticed_and_the_next_donor_taken(
    serve: Serve, interpose: Callable[..., Donor], path: str
) -> None:
    liar = interpose(only(path, lambda path, body: body[:-1]), is_cut=True)
    with pytest.raises(RecoveryFailed, match=r"liar at .*IncompleteRead"):
        fetch(liar)
    require_honest(*fetch(liar, serve()))


@pytest.mark.parametrize(
    "body", [lambda b: b[:-4], lambda b: b + b"more", lambda b: b""], ids=["short", "long", "none"]
)
@pytest.mark.parametrize("path", ["/chunk/7/params/0", "/chunk/7/momentum/3"])
def test_chunk_of_another_length_is_noticed_and_the_next_donor_taken(
    serve: Serve, interpose: Callable[..., Donor], path: str, body: Callable[[bytes], bytes]
) -> None:
    liar = interpose(only(path, lambda path, whole: body(whole)), is_consistent=True)
    with pytest.raises(RecoveryFailed, match=r"liar at .*chunk \d+ of \w+ has \d+ bytes, not \d+"):
        fetch(liar)
    require_honest(*fetch(liar, serve()))


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        ({"round": 8}, "/chunk/8/params/0 answered 404"),
        ({"sections": {"params": N}}, "this node needs"),
        ({"sections": {"params": N, "momentum": N - 1}}, "this node needs"),
        ({"chunk_bytes": 0}, "answers nonsense: ValueError"),
        ({"chunk_bytes": -1024}, "0 of 8024 bytes arrived"),
        ({"chunk_bytes": 512}, "chunk 0 of params has 1024 bytes, not 512"),
        ({"chunk_bytes": "many"}, "answers nonsense: ValueError"),
    ],
    ids=str,
)
def test_manifest_that_lies_is_noticed_and_the_next_donor_taken(
    serve: Serve, interpose: Callable[..., Donor], manifest: dict[str, Any], why: str
) -> None:
    liar = interpose(
        only("/state", lambda path, body: json.dumps(json.loads(body) | manifest).encode()), is_consistent=True
    )
    with pytest.raises(RecoveryFailed, match=f"liar at .*{why}"):
        fetch(liar)
    require_honest(*fetch(liar, serve()))


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"{}", b"<html>", b"\xff\xfe"])
def test_donor_that_talks_nonsense_is_noticed_and_the_next_one_taken(
    serve: Serve, interpose: Callable[..., Donor], body: bytes
) -> None:
    liar = interpose(lambda path, _: body, is_consistent=True)
    require_honest(*fetch(liar, serve()))
    assert fetch_entry([liar, serve()], KEY, 5).state == "digest of 5"


def test_entry_of_another_round_is_noticed_and_the_next_donor_taken(serve: Serve) -> None:
    liar = serve("liar", journal=lambda round: entry_of(round - 1))
    with pytest.raises(RecoveryFailed, match="round 4 where round 5 was asked for"):
        fetch_entry([liar], KEY, 5)
    assert torch.equal(fetch_entry([liar, serve()], KEY, 5).result, values(5))


def test_flipped_bit_of_an_entry_is_noticed_and_the_next_donor_taken(
    serve: Serve, interpose: Callable[..., Donor]
) -> None:
    entry = fetch_entry([interpose(flip), serve()], KEY, 5)
    assert torch.equal(entry.result, values(5))


def test_entry_that_a_donor_no_longer_keeps_is_fetched_from_the_next(serve: Serve) -> None:
    forgetful = serve("forgetful", journal=lambda round: None)
    assert fetch_entry([forgetful, serve()], KEY, 5).round == 5


def test_donor_that_is_gone_is_passed_over(serve: Serve, free_port: int) -> None:
    require_honest(*fetch(Donor("gone", "127.0.0.1", free_port), serve()))


def test_donor_that_is_silent_is_passed_over(
    serve: Serve, interpose: Callable[..., Donor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "_TIMEOUT_S", 0.05)
    go_on = threading.Event()

    def say_nothing(path: str, body: bytes) -> bytes:
        go_on.wait(5)
        return body

    require_honest(*fetch(interpose(only("/chunk", say_nothing)), serve()))
    go_on.set()


@pytest.fixture
def free_port() -> int:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        return int(server.server_address[1])


def test_failure_names_every_donor_and_what_is_wrong_with_it(
    serve: Serve, interpose: Callable[..., Donor], free_port: int
) -> None:
    liar, small = interpose(flip), serve("small", replace(Copy(), sections={"params": values(1, 5)}))
    with pytest.raises(RecoveryFailed) as e:
        fetch(Donor("gone", "127.0.0.1", free_port), liar, small)
    assert f"gone at 127.0.0.1:{free_port}: [Errno" in str(e.value)
    assert f"liar at 127.0.0.1:{liar.port}: /state does not match its hash" in str(e.value)
    assert f"small at 127.0.0.1:{small.port}: it serves sections {{'params': 5}}" in str(e.value)


def test_failure_without_donors_says_that_nobody_is_alive() -> None:
    with pytest.raises(RecoveryFailed, match="no member is alive"):
        fetch_entry([], KEY, 1)


def test_donor_that_cannot_make_a_copy_is_passed_over(stack: ExitStack, serve: Serve) -> None:
    def copy_state() -> Copy:
        raise RecoveryFailed("no step ended")

    server = StateServer("127.0.0.1", KEY, copy_state, entry_of)
    stack.callback(server.close)
    busy = Donor("busy", "127.0.0.1", server.port)
    with pytest.raises(RecoveryFailed, match=r"busy at .*/state answered 503"):
        fetch(busy)
    require_honest(*fetch(busy, serve()))
