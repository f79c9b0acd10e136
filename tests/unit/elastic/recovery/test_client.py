"""A joiner and its donors over loopback, and what stands before a donor that is not to be trusted."""

from __future__ import annotations

import http.client
import json
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.stores import free_port
from tests.unit.elastic.recovery.open_server import DIALLER, OpenServer, ask, shaken
from torch import Tensor

from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import Peer, RestartPoint, RoundPlan, Verdict, View
from zeroband.elastic.recovery import state_chunks, transfer
from zeroband.elastic.recovery.client import (
    FetchedState,
    FetchProgress,
    RecoveryClient,
    StateFetch,
    fetch_entry,
    fetch_offer,
    no_donor_in,
)
from zeroband.elastic.recovery.donors import Donor, DonorConnection, FetchLimits
from zeroband.elastic.recovery.state_chunks import chunk_hash
from zeroband.elastic.rounds.carriage import offer_of
from zeroband.elastic.transport.sealed import wrap
from zeroband.errors import HandshakeFailed, RecoveryFailed
from zeroband.node.faults import FaultPoints
from zeroband.node.shared_flags import SharedFlags
from zeroband.state.round_state import LiveState, RoundState, RoundUpdate

N = 1003
CHUNK_BYTES = 512
CHUNKS = 2 * -(-4 * N // CHUNK_BYTES)


def values(seed: int, n: int = N) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


STATE = RoundState(
    7,
    {"progress": {"inner_step": 70}, "weight": 30},
    "digest of 7",
    {"params": values(1), "momentum": values(2)},
)
LIE = {"params": values(3), "momentum": values(4)}


def update_of(round: int) -> Tensor:
    return values(round).view(torch.uint8)


def room(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def entry_of(round: int) -> RoundUpdate | None:
    return RoundUpdate(round, update_of(round), {"weight": round}, f"digest of {round}") if 3 <= round <= 7 else None


class Relay:
    """Stands before a member under a name of its own: counts what is asked for and alters what is answered.

    `alter(path, body)` gives another body, `length(path, altered)` what is said of its length. With `is_cut` the
    length of the original is said, and a shorter body is followed by a hang-up.
    """

    def __init__(self, member_id: str, behind: Donor) -> None:
        self.alter: Callable[[str, bytes], bytes] = lambda path, body: body
        self.length: Callable[[str, bytes], int | None] = lambda path, altered: len(altered)
        self.is_cut = False
        self.sent: list[str] = []
        """Paths that are answered by 200 and to their end."""
        self._behind = behind
        self.connections: set[socket.socket] = set()
        relay = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                relay.connections.add(self.connection)

            def do_GET(self) -> None:
                relay.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    sealed: Any = wrap(request, shaken(request, member_id))
                except (OSError, EOFError, HandshakeFailed):
                    return self.shutdown_request(request)
                super().process_request_thread(sealed, client_address)

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.donor = Donor(member_id, "127.0.0.1", self._server.server_address[1])
        serve = {"poll_interval": 0.01}
        threading.Thread(target=self._server.serve_forever, kwargs=serve, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        status, body = ask(self._behind, handler.path)
        altered = self.alter(handler.path, body)
        length = len(body) if self.is_cut else self.length(handler.path, altered)
        handler.close_connection = length != len(altered)
        if status == 200 and length == len(altered):
            self.sent.append(handler.path)  # before it is: the joiner may be done before this thread goes on
        handler.send_response(status)
        if length is not None:
            handler.send_header("Content-Length", str(length))
        handler.end_headers()
        handler.wfile.write(altered)

    def chunks_sent(self) -> list[str]:
        return [path for path in self.sent if path.count("/") == 4]

    def die(self) -> None:
        """Stop listening, and hang up on all who are connected."""
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self.connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


Serve = Callable[..., Donor]
Interpose = Callable[..., Relay]


@pytest.fixture
def serve(stack: ExitStack) -> Serve:
    """Start a member that serves a state and a journal."""

    def start(
        member_id: str = "honest",
        copy: RoundState = STATE,
        journal: Callable[[int], Any] = entry_of,
        chunk_bytes: int = CHUNK_BYTES,
        offered: Callable[[], RoundUpdate | None] = lambda: None,
    ) -> Donor:
        options: dict[str, Any] = {"chunk_bytes": chunk_bytes, "offered": offered}
        server = OpenServer(member_id, lambda: copy, journal, current_round=lambda: copy.round, **options)
        stack.callback(server.close)
        return server.donor

    return start


@pytest.fixture
def interpose(stack: ExitStack, serve: Serve) -> Interpose:
    """Start a member whose answers pass through a relay; `changes` are attributes of the relay."""

    def start(member_id: str = "liar", behind: Donor | None = None, **changes: Any) -> Relay:
        relay = Relay(member_id, behind or serve())
        stack.callback(relay.die)
        for name, value in changes.items():
            setattr(relay, name, value)
        return relay

    return start


def only(paths: str, alter: Callable[[str, bytes], bytes]) -> Callable[[str, bytes], bytes]:
    """Alter the answers to the paths of this pattern."""
    return lambda path, body: alter(path, body) if re.fullmatch(paths, path) else body


def flip(path: str, body: bytes) -> bytes:
    return body[:-1] + bytes([body[-1] ^ 1])


def changed(**values: Any) -> Callable[[str, bytes], bytes]:
    """Alter the values of a manifest."""
    return lambda path, body: json.dumps(json.loads(body) | values).encode()


LIMITS = FetchLimits(connections=2, backoff_s=0.001, silent_s=5.0, straggler_s=0.02)
ONE_BY_ONE = replace(LIMITS, connections=1)
"""One connection to each donor, so that a donor is asked for one chunk after the other."""

CHUNKS_OF_7 = r"/state/7/\w+/\d+"
STATE_BYTES = 2 * 4 * N
DEADLINE_S = 10.0


def zeros() -> dict[str, Tensor]:
    return {"params": torch.zeros(N), "momentum": torch.zeros(N)}


def fetch(*donors: Donor, limits: FetchLimits = LIMITS, **options: Any) -> tuple[FetchedState, dict[str, Tensor]]:
    sections = zeros()
    return StateFetch(DIALLER, sections, limits=limits).fetch(donors, **options), sections


def require_honest(fetched: FetchedState, sections: dict[str, Tensor]) -> None:
    assert (fetched.round, fetched.state_digest, fetched.record) == (7, "digest of 7", STATE.record)
    assert torch.equal(sections["params"], values(1))
    assert torch.equal(sections["momentum"], values(2))


def no_straggler(limits: FetchLimits) -> FetchLimits:
    return replace(limits, straggler_s=1000.0)


# -- a state from donors that are well -----------------------------------------------------------------------------


@pytest.mark.defect(7)
def test_fetched_state_is_the_donors_to_the_last_bit_with_what_belongs_to_it(serve: Serve) -> None:
    chunks: list[tuple[int, int]] = []
    sections = zeros()
    fetched = StateFetch(DIALLER, sections, limits=no_straggler(LIMITS)).fetch(
        [serve()], lambda *sizes: chunks.append(sizes)
    )
    require_honest(fetched, sections)
    assert fetched.received_bytes == {"honest": STATE_BYTES}
    assert fetched.dropped == {}
    assert fetched.took_s > 0
    assert sum(sent for sent, _ in chunks) == STATE_BYTES
    assert {total for _, total in chunks} == {STATE_BYTES}
    assert len(chunks) == CHUNKS


def test_chunks_come_from_all_donors_at_once_and_each_from_one(interpose: Interpose, serve: Serve) -> None:
    member = serve()
    all_asked = threading.Barrier(3)

    def await_others(relay: Relay) -> Callable[[str, bytes], bytes]:
        first = threading.Lock()

        def alter(path: str, body: bytes) -> bytes:
            if first.acquire(blocking=False):
                all_asked.wait(DEADLINE_S)
            return body

        return only(CHUNKS_OF_7, alter)

    relays = [interpose(name, member) for name in "abc"]
    for relay in relays:
        relay.alter = await_others(relay)
    fetched, sections = fetch(*(relay.donor for relay in relays), limits=no_straggler(LIMITS))
    require_honest(fetched, sections)
    assert set(fetched.received_bytes) == set("abc")
    assert sum(fetched.received_bytes.values()) == STATE_BYTES
    sent = Counter(path for relay in relays for path in relay.chunks_sent())
    assert set(sent.values()) == {1} and len(sent) == CHUNKS


def test_no_more_donors_are_asked_than_the_limit_says(interpose: Interpose, serve: Serve) -> None:
    member = serve()
    relays = [interpose(name, member) for name in "abc"]
    fetch(*(relay.donor for relay in relays), limits=replace(LIMITS, donors_at_once=2))
    assert relays[2].sent == []


def test_chunks_are_of_the_round_of_the_manifest_while_rounds_go_on(stack: ExitStack) -> None:
    now = [7]

    def copy_state() -> RoundState:
        round = now[0]
        return RoundState(round, {}, f"digest of {round}", after(round))

    server = OpenServer("honest", copy_state, entry_of, current_round=lambda: now[0], chunk_bytes=CHUNK_BYTES)
    stack.callback(server.close)
    donor = server.donor
    others: list[FetchedState] = []

    def go_on(chunk_bytes: int, total_bytes: int) -> None:
        if now[0] < 10:
            now[0] += 1
            others.append(fetch(donor)[0])  # another joiner, in the middle of this one

    sections = zeros()
    fetched = StateFetch(DIALLER, sections, limits=LIMITS).fetch([donor], go_on)
    assert fetched.round == 7
    assert others[0].round == 8
    assert torch.equal(sections["params"], values(70))
    assert torch.equal(sections["momentum"], values(71))


class Training:
    """A member's state, which changes where it lies."""

    def __init__(self) -> None:
        self.round = 7
        self.lock = threading.Lock()
        self.sections = {"params": values(70), "momentum": values(71)}

    def go_on(self) -> None:
        with self.lock:
            self.round += 1
            for name, value in after(self.round).items():
                self.sections[name].copy_(value)

    def live_state(self) -> LiveState:
        record, digest = {"weight": self.round}, f"digest of {self.round}"
        return LiveState(self.round, record, digest, self.sections, lock=self.lock, round_now=lambda: self.round)


def after(round: int) -> dict[str, Tensor]:
    return {"params": values(10 * round), "momentum": values(10 * round + 1)}


@pytest.fixture
def training(stack: ExitStack) -> tuple[Training, Donor]:
    """A member that serves its state as it lies there."""
    training = Training()
    now: Callable[[], int] = lambda: training.round  # noqa: E731
    server = OpenServer("honest", training.live_state, entry_of, current_round=now, chunk_bytes=CHUNK_BYTES)
    stack.callback(server.close)
    return training, server.donor


@pytest.mark.parametrize("connections", [1, 3])
def test_fetch_goes_on_with_the_next_round_and_says_which_values_are_of_which(
    training: tuple[Training, Donor], connections: int
) -> None:
    member, donor = training
    arrived, totals, sections = [0], set[int](), zeros()

    def go_on(chunk_bytes: int, total_bytes: int) -> None:
        totals.add(total_bytes)
        arrived[0] += 1
        if arrived[0] in (3, 8):
            member.go_on()

    limits = no_straggler(replace(LIMITS, connections=connections))
    fetched = StateFetch(DIALLER, sections, mixes=True, limits=limits).fetch([donor], go_on)
    first = fetched.round
    assert (fetched.record, fetched.state_digest) == ({"weight": first}, f"digest of {first}")
    assert totals == {STATE_BYTES} and fetched.dropped == {}
    rounds = {newest for *_, newest in fetched.later}
    if connections == 1:
        assert (first, rounds) == (7, {8, 9})
    else:  # values count with all sections of them: of the first three chunks, or of the next five, none may be whole
        assert first in (7, 8) and rounds <= {8, 9} - {first}
    expected = after(first)
    for start, stop, newest in fetched.later:
        for name, value in after(newest).items():
            expected[name][start:stop] = value[start:stop]
    for name, section in sections.items():
        assert torch.equal(section, expected[name])


def test_fetch_that_mixes_goes_on_in_another_call_and_its_next_one_is_new(training: tuple[Training, Donor]) -> None:
    member, donor = training
    sections = zeros()
    state = StateFetch(DIALLER, sections, mixes=True, limits=no_straggler(ONE_BY_ONE))

    def interrupt(chunk_bytes: int, total_bytes: int) -> None:
        if sections["params"][4 * CHUNK_BYTES // 4] != 0:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        state.fetch([donor], interrupt)
    member.go_on()
    fetched = state.fetch([donor])
    assert fetched.round == 7 and {newest for *_, newest in fetched.later} == {8}
    again = state.fetch([donor])
    assert (again.round, again.later) == (8, ())
    assert torch.equal(sections["params"], after(8)["params"])


def test_fetch_that_mixes_from_a_donor_that_always_goes_on_ends(training: tuple[Training, Donor]) -> None:
    member, donor = training
    relay_of_time = Relay("restless", donor)
    relay_of_time.alter = only(r"/state/.*", lambda path, body: (member.go_on(), body)[1])
    with pytest.raises(RecoveryFailed, match="restless at"):
        StateFetch(DIALLER, zeros(), mixes=True, limits=ONE_BY_ONE).fetch([relay_of_time.donor])
    relay_of_time.die()


@pytest.fixture
def two_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Donors hash two chunks of each section at a time, of eight."""
    monkeypatch.setattr(state_chunks, "STRETCH", 2)


@pytest.mark.usefixtures("two_by_two")
def test_hashes_are_fetched_stretch_by_stretch_beside_the_chunks(interpose: Interpose) -> None:
    relay, totals = interpose("honest"), set[int]()
    fetched, sections = fetch(relay.donor, limits=no_straggler(LIMITS), on_chunk=lambda _, total: totals.add(total))
    require_honest(fetched, sections)
    assert (fetched.received_bytes, totals) == ({"honest": STATE_BYTES}, {STATE_BYTES})
    assert [path for path in relay.sent if path.count("/") == 3] == [f"/state/7/{first}" for first in (0, 2, 4, 6)]
    assert relay.sent.index("/state/7/6") < len(relay.sent) - 4, "asked for before the chunks up to it were there"
    entry = fetch_entry([relay.donor], DIALLER, 5, room, limits=LIMITS)
    assert torch.equal(entry.update, update_of(5))


@pytest.mark.usefixtures("two_by_two")
def test_lead_that_lies_about_later_hashes_costs_one_attempt(interpose: Interpose, serve: Serve) -> None:
    lies = {name: {"bytes": 4 * N, "hashes": ["lie", "lie"]} for name in zeros()}
    liar, honest = interpose("liar", alter=only("/state/7/4", changed(sections=lies))), interpose("honest")
    sections = zeros()
    state = StateFetch(DIALLER, sections, limits=no_straggler(LIMITS))
    with pytest.raises(RecoveryFailed, match="does not match its hash"):
        state.fetch([liar.donor, honest.donor])
    require_honest(state.fetch([honest.donor, liar.donor]), sections)


@pytest.mark.usefixtures("two_by_two")
def test_state_that_nobody_serves_to_its_end_is_fetched_anew(interpose: Interpose, serve: Serve) -> None:
    changed_meanwhile = changed(state_digest="digest of another 7")
    odd = interpose("odd", alter=only("/state/7/4", changed_meanwhile))
    sections = zeros()
    state = StateFetch(DIALLER, sections, limits=ONE_BY_ONE)
    with pytest.raises(RecoveryFailed, match=r"odd at .*: its state_digest is 'digest of another 7', the lead's"):
        state.fetch([odd.donor])
    require_honest(state.fetch([serve()]), sections)
    assert set(Counter(odd.chunks_sent()).values()) == {1}


@pytest.mark.usefixtures("two_by_two")
@pytest.mark.parametrize("asked", range(0, 8, 2))
def test_fetch_goes_on_with_the_next_round_whenever_hashes_are_asked_for(
    training: tuple[Training, Donor], interpose: Interpose, asked: int
) -> None:
    member, donor = training
    relay, sections = interpose("honest", donor), zeros()
    relay.alter = only(f"/state/7/{asked}", lambda path, body: (member.go_on(), body)[1])
    fetched = StateFetch(DIALLER, sections, mixes=True, limits=no_straggler(LIMITS)).fetch([relay.donor])
    expected = after(fetched.round)
    for start, stop, newest in fetched.later:
        for name, value in after(newest).items():
            expected[name][start:stop] = value[start:stop]
    for name, section in sections.items():
        assert torch.equal(section, expected[name])


def test_state_without_values_is_fetched(serve: Serve) -> None:
    copy = replace(STATE, sections={"params": torch.zeros(0)})
    assert StateFetch(DIALLER, {"params": torch.zeros(0)}, limits=LIMITS).fetch([serve(copy=copy)]).round == 7


# -- donors that leave, stall or come back --------------------------------------------------------------------------


def dying(relay: Relay, after: int) -> Callable[[str, bytes], bytes]:
    """Let a relay answer so many chunks and then die."""

    def alter(path: str, body: bytes) -> bytes:
        if len(relay.chunks_sent()) < after:
            return body
        relay.die()
        return b""

    return only(CHUNKS_OF_7, alter)


def test_donor_that_dies_in_the_middle_is_replaced_and_nothing_is_fetched_twice(
    interpose: Interpose, serve: Serve
) -> None:
    member = serve()
    weak, honest, late = (interpose(name, member) for name in ("weak", "honest", "late"))
    weak.alter, weak.is_cut = dying(weak, after=5), True
    donors = [relay.donor for relay in (weak, honest, late)]
    fetched, sections = fetch(*donors, limits=no_straggler(replace(ONE_BY_ONE, donors_at_once=1)))
    require_honest(fetched, sections)
    assert fetched.received_bytes == {"weak": 5 * CHUNK_BYTES, "honest": STATE_BYTES - 5 * CHUNK_BYTES}
    assert list(fetched.dropped) == ["weak"]
    assert set(Counter(weak.chunks_sent() + honest.chunks_sent()).values()) == {1}
    assert late.sent == []


def test_fetch_goes_on_where_it_was_once_a_donor_returns(interpose: Interpose, serve: Serve) -> None:
    member = serve()
    weak, back = interpose("weak", member), interpose("back", member)
    weak.alter, weak.is_cut = dying(weak, after=5), True
    sections = zeros()
    state = StateFetch(DIALLER, sections, limits=no_straggler(ONE_BY_ONE))
    for _ in range(2):
        with pytest.raises(RecoveryFailed, match="weak at "):
            state.fetch([weak.donor])
    with pytest.raises(RecoveryFailed, match="no member is alive"):
        state.fetch([])
    chunks: list[tuple[int, int]] = []
    fetched = state.fetch([back.donor], lambda *sizes: chunks.append(sizes))
    require_honest(fetched, sections)
    assert set(Counter(weak.chunks_sent() + back.chunks_sent()).values()) == {1}
    assert fetched.received_bytes == {"weak": 5 * CHUNK_BYTES, "back": STATE_BYTES - 5 * CHUNK_BYTES}
    assert {total for _, total in chunks} == {STATE_BYTES - 5 * CHUNK_BYTES}
    assert sum(sent for sent, _ in chunks) == STATE_BYTES - 5 * CHUNK_BYTES


def test_fetch_goes_on_with_its_round_though_the_donor_is_at_another(stack: ExitStack, interpose: Interpose) -> None:
    now = [7]
    server = OpenServer(
        "honest", lambda: replace(STATE, round=now[0]), entry_of, current_round=lambda: now[0], chunk_bytes=512
    )
    stack.callback(server.close)
    member = server.donor
    weak, back = interpose("weak", member), interpose("back", member)
    weak.alter, weak.is_cut = dying(weak, after=5), True
    sections = zeros()
    state = StateFetch(DIALLER, sections, limits=no_straggler(ONE_BY_ONE))
    with pytest.raises(RecoveryFailed):
        state.fetch([weak.donor])
    now[0] = 8
    require_honest(state.fetch([back.donor]), sections)
    assert len(back.chunks_sent()) == CHUNKS - 5
    newest = state.fetch([back.donor])  # what was begun is whole
    assert (newest.round, newest.received_bytes) == (8, {"back": STATE_BYTES})


def test_fetch_starts_anew_where_nobody_serves_what_was_begun(interpose: Interpose, serve: Serve) -> None:
    weak = interpose("weak", serve())
    weak.alter, weak.is_cut = dying(weak, after=5), True
    sections = zeros()
    state = StateFetch(DIALLER, sections, limits=ONE_BY_ONE)
    with pytest.raises(RecoveryFailed):
        state.fetch([weak.donor])
    newer = serve("newer", RoundState(9, {}, "digest of 9", LIE))
    with pytest.raises(RecoveryFailed, match=r"newer at .* answered 404"):
        state.fetch([newer])
    fetched = state.fetch([newer])
    assert (fetched.round, fetched.received_bytes) == (9, {"newer": STATE_BYTES})
    assert torch.equal(sections["params"], values(3))
    assert torch.equal(sections["momentum"], values(4))


def test_slow_donor_does_not_hold_up_the_fetch(interpose: Interpose, serve: Serve) -> None:
    member = serve()
    slow, fast = interpose("slow", member), interpose("fast", member)
    is_fetched, is_asked = threading.Event(), threading.Event()

    def stall(path: str, body: bytes) -> bytes:
        is_asked.set()
        is_fetched.wait(DEADLINE_S)
        return body

    def follow(path: str, body: bytes) -> bytes:
        is_asked.wait(DEADLINE_S)
        return body

    slow.alter, fast.alter = only(CHUNKS_OF_7, stall), only(CHUNKS_OF_7, follow)
    before = set(threading.enumerate())
    fetched, sections = fetch(slow.donor, fast.donor)
    require_honest(fetched, sections)
    assert [thread for thread in set(threading.enumerate()) - before if thread.name == "recovery"] == []
    assert not is_fetched.is_set()
    is_fetched.set()
    assert fetched.received_bytes == {"fast": STATE_BYTES}
    assert len(fast.chunks_sent()) == CHUNKS


def test_connection_that_breaks_now_and_then_is_tried_again(interpose: Interpose) -> None:
    asked: Counter[str] = Counter()

    def cut_once(path: str, body: bytes) -> bytes:
        asked[path] += 1
        return body[:-1] if asked[path] == 1 else body

    shaky = interpose("shaky")
    shaky.alter, shaky.is_cut = only(CHUNKS_OF_7, cut_once), True
    fetched, sections = fetch(shaky.donor, limits=no_straggler(LIMITS))
    require_honest(fetched, sections)
    assert fetched.dropped == {}
    assert set(asked.values()) == {2}


def test_donor_that_is_silent_is_passed_over(interpose: Interpose, serve: Serve) -> None:
    go_on = threading.Event()

    def say_nothing(path: str, body: bytes) -> bytes:
        go_on.wait(DEADLINE_S)
        return body

    silent = interpose("silent", alter=only(CHUNKS_OF_7, say_nothing))
    impatient = replace(LIMITS, silent_s=0.25, retries=0)
    with pytest.raises(RecoveryFailed, match=r"silent at .*timed out"):
        fetch(silent.donor, limits=impatient)
    require_honest(*fetch(silent.donor, serve(), limits=impatient))
    go_on.set()


def test_donor_that_is_gone_is_passed_over(serve: Serve) -> None:
    require_honest(*fetch(Donor("gone", "127.0.0.1", free_port()), serve()))


def test_donor_that_cannot_make_a_copy_is_passed_over(stack: ExitStack, serve: Serve) -> None:
    def copy_state() -> RoundState:
        raise RecoveryFailed("no step ended")

    server = OpenServer("busy", copy_state, entry_of, current_round=lambda: 7)
    stack.callback(server.close)
    busy = server.donor
    with pytest.raises(RecoveryFailed, match=r"busy at .*/state answered 503"):
        fetch(busy)
    require_honest(*fetch(busy, serve()))


def test_failure_names_every_donor_and_what_is_wrong_with_it(serve: Serve) -> None:
    port = free_port()
    small = serve("small", replace(STATE, sections={"params": values(1, 5)}))
    with pytest.raises(RecoveryFailed) as e:
        fetch(Donor("gone", "127.0.0.1", port), small)
    assert f"gone at 127.0.0.1:{port}: [Errno" in str(e.value)
    assert f"small at 127.0.0.1:{small.port}: it serves sections of {{'params': 20}} bytes" in str(e.value)


# -- donors that lie ------------------------------------------------------------------------------------------------


def test_flipped_bit_costs_the_donor_its_place_at_once(interpose: Interpose, serve: Serve) -> None:
    member = serve()
    liar, honest = interpose("liar", member), interpose("honest", member)
    is_asked = threading.Event()

    def lie(path: str, body: bytes) -> bytes:
        is_asked.set()
        return flip(path, body)

    def follow(path: str, body: bytes) -> bytes:
        is_asked.wait(DEADLINE_S)
        return body

    liar.alter, honest.alter = only(CHUNKS_OF_7, lie), only(CHUNKS_OF_7, follow)
    fetched, sections = fetch(liar.donor, honest.donor, limits=no_straggler(ONE_BY_ONE))
    require_honest(fetched, sections)
    assert len(liar.chunks_sent()) == 1
    assert fetched.dropped == {"liar": f"{liar.chunks_sent()[0]} does not match its hash"}
    assert fetched.received_bytes == {"honest": STATE_BYTES}


def test_all_connections_to_a_donor_that_lied_are_cut(interpose: Interpose, serve: Serve) -> None:
    first, is_over = threading.Lock(), threading.Event()

    def lie_once_and_stall(path: str, body: bytes) -> bytes:
        if not first.acquire(blocking=False):
            is_over.wait(DEADLINE_S)
        return flip(path, body)

    liar = interpose(alter=only(CHUNKS_OF_7, lie_once_and_stall))
    fetched, sections = fetch(liar.donor, serve(), limits=no_straggler(replace(LIMITS, donors_at_once=1)))
    require_honest(fetched, sections)
    assert not is_over.is_set()
    assert fetched.took_s < LIMITS.silent_s
    is_over.set()


@pytest.mark.defect(9)
def test_nothing_is_written_that_does_not_match_its_hash(interpose: Interpose) -> None:
    liar = interpose(alter=only(CHUNKS_OF_7, flip))
    sections = zeros()
    with pytest.raises(RecoveryFailed, match=r"liar at .* does not match its hash"):
        StateFetch(DIALLER, sections, limits=LIMITS).fetch([liar.donor])
    assert all(not section.any() for section in sections.values())


def test_nothing_is_written_once_the_fetch_has_ended(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    has_ended, is_hashing, hashed = threading.Event(), threading.Event(), threading.Event()
    first = threading.Lock()

    def hash_late(data: memoryview) -> str:
        if first.acquire(blocking=False):
            is_hashing.set()
            has_ended.wait(DEADLINE_S)
            hashed.set()
        else:
            is_hashing.wait(DEADLINE_S)
        return chunk_hash(data)

    def interrupt(chunk_bytes: int, total_bytes: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(transfer, "chunk_hash", hash_late)
    monkeypatch.setattr(transfer, "_STOP_S", 0.01)
    sections = zeros()
    with pytest.raises(KeyboardInterrupt):
        StateFetch(DIALLER, sections, limits=no_straggler(LIMITS)).fetch([serve()], interrupt)
    for section in sections.values():
        section.zero_()
    threads = [thread for thread in threading.enumerate() if thread.name == "recovery"]
    has_ended.set()
    assert hashed.wait(DEADLINE_S)
    for thread in threads:
        thread.join(DEADLINE_S)
    assert all(not section.any() for section in sections.values())


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ({"state_digest": "digest of a lie"}, "its state_digest is 'digest of a lie', the lead's is 'digest of 7'"),
        ({"sections": LIE}, "its chunk 0 of "),
        ({"record": {"weight": 31}}, "its record is {'weight': 31}"),
    ],
    ids=["state", "values", "record"],
)
def test_donor_that_claims_something_else_than_the_first_one_is_dropped(
    serve: Serve, interpose: Interpose, lie: dict[str, Any], why: str
) -> None:
    is_asked, first = threading.Event(), threading.Lock()
    liar, honest = interpose("liar", serve(copy=replace(STATE, **lie))), interpose("honest")

    def await_liar(path: str, body: bytes) -> bytes:
        if first.acquire(blocking=False):
            is_asked.wait(DEADLINE_S)
            time.sleep(0.05)  # its answer has come by then
        return body

    liar.alter = only("/state/7/0", lambda path, body: (is_asked.set(), body)[1])
    honest.alter = only(CHUNKS_OF_7, await_liar)
    fetched, sections = fetch(honest.donor, liar.donor, limits=no_straggler(LIMITS))
    require_honest(fetched, sections)
    assert liar.chunks_sent() == []
    assert fetched.dropped["liar"].startswith(why)


class Members:
    """The store of a run as `RecoveryClient` sees it: who serves, and the newest verdict."""

    def __init__(self, *donors: Donor, round: int = 7, built_on: str = "") -> None:
        record = {"progress": Progress.at_start().to_record(), "state_before": built_on}
        peers = {d.member_id: Peer(d.member_id, d.host, d.port, serves_state=True) for d in donors}
        members = tuple(sorted(peers))
        zeros = (0,) * len(members)
        self.committed = Verdict(RoundPlan(1, 1, round, members, zeros, zeros, zeros, ()), "d", record)
        self._view = View(None, self.committed, frozenset(members), {}, {}, None, peers=peers)

    def view(self, round: int) -> View:
        return replace(self._view, committed=self.committed)

    def now_at(self, round: int, built_on: str) -> None:
        plan = replace(self.committed.plan, round=round)
        record = {**self.committed.record, "state_before": built_on}
        self.committed = replace(self.committed, plan=plan, record=record)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Members], Any]]:
    """client(members): what fetches from them, in the order of their names, and the sections that it fetches into."""
    monkeypatch.setattr(random, "shuffle", lambda donors: donors.sort(key=lambda donor: donor.member_id))
    flags = SharedFlags(tmp_path / "flags", create=True)

    def made(members: Members) -> tuple[RecoveryClient, dict[str, Tensor]]:
        store, sections = members, zeros()
        anything: Any = sections
        client = RecoveryClient(store, DIALLER, anything, flags, FaultPoints(()), lambda kind, **fields: None)  # type: ignore[arg-type]
        client.begin(tuple(sections))
        return client, sections

    yield made
    flags.close()


@pytest.mark.parametrize("lie", ["its values", "its digest", "a round that nobody committed"])
def test_consistent_lie_ends_at_the_record_of_a_verdict_and_another_member_leads(
    serve: Serve, client: Any, lie: str
) -> None:
    copy = replace(STATE, sections=LIE, state_digest="digest of a lie")
    round = 9 if lie == "a round that nobody committed" else 7
    members = Members(serve("a liar", replace(copy, round=round)), serve("b"), serve("c"))
    recovery, sections = client(members)
    if lie == "its digest":  # the next round is there already
        members.now_at(8, "digest of 7")
    fetched = recovery.fetch_state()
    if lie == "its values":
        assert fetched.state_digest == "digest of a lie"
        recovery.judge(7, "digest of a lie")  # nobody knows better yet
        members.now_at(8, "digest of 7")
        with pytest.raises(RecoveryFailed, match="round 8 was built on digest of 7"):
            recovery.judge(7, "digest of a lie")
        assert recovery.verified_bytes == 0
        fetched = recovery.fetch_state()
    require_honest(fetched, sections)


def test_each_attempt_is_led_by_another_member_and_all_of_it_by_one(serve: Serve, client: Any) -> None:
    recovery, _ = client(Members(serve("a"), serve("b")))
    led = list[set[str]]()
    for _ in range(3):
        recovery.fetch_state()
        recovery.fetch_entry(5, room)
        led.append(recovery.leads)
    assert led == [{"a"}, {"b"}, {"a"}]


# -- what a member offers to its carrier ------------------------------------------------------------------------------


def test_contribution_that_is_offered_is_fetched_once_and_the_next_one_after_it(serve: Serve) -> None:
    """Also where the next one is of the same round: it is another one by its hash."""
    offers = [offer_of(3, update_of(3)), offer_of(3, update_of(4)), offer_of(5, update_of(5))]
    current = [offers[0]]
    donor, known = serve(offered=lambda: current[0]), ""
    for offer in offers:
        current[0] = offer
        came = fetch_offer(donor, DIALLER, known, room, limits=LIMITS)
        assert came is not None and came.state_digest == offer.state_digest and torch.equal(came.update, offer.update)
        known = came.state_digest
        assert fetch_offer(donor, DIALLER, known, room, limits=LIMITS) is None


def test_member_that_offers_nothing_says_so(serve: Serve) -> None:
    with pytest.raises(RecoveryFailed, match="/offer answered 404"):
        fetch_offer(serve(), DIALLER, "", room, limits=LIMITS)


def test_contribution_of_another_size_is_refused_before_it_is_sent(serve: Serve) -> None:
    def no_room(nbytes: int) -> Tensor:
        raise RecoveryFailed(f"no contribution takes {nbytes} bytes")

    with pytest.raises(RecoveryFailed, match="no contribution takes"):
        fetch_offer(serve(offered=lambda: offer_of(3, update_of(3))), DIALLER, "", no_room, limits=LIMITS)


MANIFEST_OF_7 = "/state/7/0"
UNFIT: dict[str, tuple[Callable[[str, bytes], bytes], str]] = {
    "other sections": (
        only(MANIFEST_OF_7, changed(sections={"params": {"bytes": 4, "hashes": ["h"]}})),
        "this node needs",
    ),
    "another round": (only(MANIFEST_OF_7, changed(round=8)), "it answers with round 8 where round 7 was asked for"),
    "short": (only(CHUNKS_OF_7, lambda path, body: body[:-4]), r"/state/7/\w+/\d has \d+ bytes, not 512"),
    "long": (only(CHUNKS_OF_7, lambda path, body: body + b"more"), r"/state/7/\w+/\d has \d+ bytes, not 512"),
    "cut off": (only(CHUNKS_OF_7, lambda path, body: body[:-1]), r"/state/7/\w+/\d: IncompleteRead"),
}
"""Answers that a donor alters, and why it is dropped."""


@pytest.mark.parametrize("what", UNFIT)
def test_answer_that_does_not_fit_is_refused_and_the_next_donor_taken(
    serve: Serve, interpose: Interpose, what: str
) -> None:
    alter, why = UNFIT[what]
    liar = interpose(alter=alter, is_cut=what == "cut off")
    with pytest.raises(RecoveryFailed, match=f"liar at .*{why}"):
        fetch(liar.donor)
    require_honest(*fetch(liar.donor, serve()))


@pytest.mark.parametrize("body", [b"", b"[]", b"[" * 100_000])
def test_donor_that_talks_nonsense_is_passed_over(serve: Serve, interpose: Interpose, body: bytes) -> None:
    liar = interpose(alter=lambda path, _: body)
    with pytest.raises(RecoveryFailed, match="liar at "):
        fetch(liar.donor)
    require_honest(*fetch(liar.donor, serve()))
    assert fetch_entry([liar.donor, serve()], DIALLER, 5, room, limits=LIMITS).state_digest == "digest of 5"


@pytest.mark.parametrize("path", ["/state", "/state/7/0", r"/state/7/params/\d", r"/state/7/momentum/\d"])
@pytest.mark.parametrize("length", [1 << 40, None], ids=["huge", "unknown"])
def test_answer_of_a_length_that_was_not_agreed_on_is_not_read(
    serve: Serve, interpose: Interpose, path: str, length: int | None
) -> None:
    def say_length(asked: str, altered: bytes) -> int | None:
        return length if re.fullmatch(path, asked) else len(altered)

    liar = interpose(length=say_length)
    with pytest.raises(RecoveryFailed, match=r"liar at .* has (an unknown number of|1099511627776) bytes, "):
        fetch(liar.donor)
    require_honest(*fetch(liar.donor, serve()))


def test_donor_that_drips_is_given_up_after_the_time_of_a_whole_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ExitStack() as stack:

        def drip() -> None:
            raw = stack.enter_context(listener.accept()[0])
            joiner = wrap(raw, shaken(raw, "liar"))
            with suppress(OSError):
                while True:
                    joiner.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    time.sleep(0.005)

        threading.Thread(target=drip, daemon=True).start()
        donor = Donor("liar", *listener.getsockname())
        connection = DonorConnection(donor, DIALLER, FetchLimits(answer_s=0.05))
        with pytest.raises((OSError, http.client.HTTPException)):
            connection.get("/state", 1000)
        connection.close()


# -- entries of the journal -----------------------------------------------------------------------------------------


def test_fetched_entry_is_the_donors(serve: Serve) -> None:
    arrived, out = list[int](), torch.zeros(N)
    into: Callable[[int], Tensor] = lambda nbytes: out.view(torch.uint8)[:nbytes]  # noqa: E731
    entry = fetch_entry([serve()], DIALLER, 5, into, on_chunk=lambda size, _: arrived.append(size), limits=LIMITS)
    assert (entry.round, entry.record, entry.state_digest) == (5, {"weight": 5}, "digest of 5")
    assert torch.equal(out, values(5)) and sum(arrived) == 4 * N

    def no_room(nbytes: int) -> Tensor:
        raise RecoveryFailed(f"no room for {nbytes}")

    with pytest.raises(RecoveryFailed, match=f"no room for {4 * N}"):
        fetch_entry([serve()], DIALLER, 5, no_room, limits=LIMITS)


def test_entry_of_another_round_is_refused_and_the_next_donor_taken(serve: Serve) -> None:
    liar = serve("liar", journal=lambda round: entry_of(round - 1))
    with pytest.raises(RecoveryFailed, match="round 4 where round 5 was asked for"):
        fetch_entry([liar], DIALLER, 5, room, limits=LIMITS)
    assert torch.equal(fetch_entry([liar, serve()], DIALLER, 5, room, limits=LIMITS).update, update_of(5))


def test_entry_of_other_sections_is_refused(interpose: Interpose, serve: Serve) -> None:
    other = {"bytes": 4, "hashes": ["h"]}
    liar = interpose(alter=only("/journal/5/0", changed(sections={"result": other})))
    with pytest.raises(RecoveryFailed, match=r"the journal of round 5 has sections {'result': 4}"):
        fetch_entry([liar.donor], DIALLER, 5, room, limits=LIMITS)
    assert fetch_entry([liar.donor, serve()], DIALLER, 5, room, limits=LIMITS).round == 5


def test_entry_that_a_donor_no_longer_keeps_is_fetched_from_the_next(serve: Serve) -> None:
    forgetful = serve("forgetful", journal=lambda round: None)
    assert fetch_entry([forgetful, serve()], DIALLER, 5, room, limits=LIMITS).round == 5
    with pytest.raises(RecoveryFailed, match=r"forgetful at .*/journal/5/0 answered 404"):
        fetch_entry([forgetful], DIALLER, 5, room, limits=LIMITS)


def test_failure_without_donors_says_that_nobody_is_alive() -> None:
    with pytest.raises(RecoveryFailed, match="no member is alive"):
        fetch_entry([], DIALLER, 1, room)
    with pytest.raises(RecoveryFailed, match="no member is alive"):
        fetch()


# -- how far ----------------------------------------------------------------------------------------------------------


def record_of_fetch(*chunks: tuple[float, int], had: int = 0) -> list[tuple[int, int, int | None]]:
    """What is recorded of a fetch whose chunks take (seconds, bytes): bytes, of so many, and bytes a second."""
    told, now_s = list[tuple[int, int, int | None]](), [100.0]

    def note(kind: str, **fields: Any) -> None:
        assert kind == "join_progress"
        told.append((fields["bytes"], fields["of_bytes"], fields["bytes_per_s"]))

    flags: Any = SimpleNamespace(advance=lambda: None)
    progress = FetchProgress(flags, FaultPoints(()), note, had, clock=lambda: now_s[0])
    for took_s, size in chunks:
        now_s[0] += took_s
        progress.count(size, sum(size for _, size in chunks))
    return told


def test_quick_fetch_is_recorded_at_its_beginning_and_its_end() -> None:
    assert record_of_fetch((0.1, 10), (0.1, 10), (0.05, 5)) == [(0, 25, None), (25, 25, 100)]


def test_long_fetch_is_recorded_each_second() -> None:
    told = record_of_fetch(*[(0.25, 10)] * 18)
    assert [done for done, _, _ in told] == [0, 40, 80, 120, 160, 180]
    assert {rate for _, _, rate in told[1:]} == {40}


def test_fetch_that_goes_on_counts_what_was_there_before() -> None:
    assert record_of_fetch((0.5, 20), had=80) == [(80, 100, None), (100, 100, 40)]


# -- without donors --------------------------------------------------------------------------------------------------


def opened(*members: str) -> RoundPlan:
    zeros = tuple(0 for _ in members)
    return RoundPlan(1, 1, 0, members, zeros, zeros, zeros, ())


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (View(None, None, frozenset(), {}, {}, None), "no member is alive"),
        (View(opened("a#1"), None, frozenset({"a#1", "j#1"}), {}, {}, None), "not committed yet; alive: a$"),
        (View(None, Verdict(opened("a#1"), "d"), frozenset({"j#1"}), {}, {}, None), "no member is alive"),
        (View(None, Verdict(opened("a#1"), "d"), frozenset({"a#1"}), {}, {}, None), "members serve none yet: a$"),
        (
            View(None, None, frozenset({"a#1"}), {}, {}, None, restart_point=RestartPoint(5, 40, "s", "a#1")),
            "a is still loading the checkpoint of step 40",
        ),
    ],
)
def test_who_has_no_donor_is_told_what_those_who_live_do(view: View, said: str) -> None:
    with pytest.raises(RecoveryFailed, match=f"no state to join with yet: .*{said}"):
        raise no_donor_in(view)
