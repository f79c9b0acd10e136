"""`bench/fuzz_port.py` at the port of one guardian in this process.

Each kind of message is sent, and an honest node is answered after all of them. The runs of three nodes that the tool
makes take minutes, by hand.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.fuzz_port import FRAME, GUARDED, MAGIC, Call, Target, kinds, opened_by
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from tests.held_stores import HeldStore
from tests.stores import free_port
from tests.unit.elastic.guardian.guarded import MEMBER, Guarded, an_order
from torch import Tensor

from zeroband.elastic.guardian.process import ListenAddress
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.recovery.serving import StateServer
from zeroband.elastic.store.connection import connect
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.engine import Engine
from zeroband.elastic.transport.handover import HandedOver, Inbox
from zeroband.elastic.transport.handshake import STORE, Purpose
from zeroband.elastic.transport.links import Links
from zeroband.errors import HandshakeFailed

KEY, RUN = RunKey(b"k" * 32), "run"
TIMES = 5
"""Number of times that each kind of message is sent."""
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Copy:
    """A state to request."""

    round: int = 7
    sections: dict[str, Tensor] = field(default_factory=lambda: {"outer": torch.arange(1000.0)})
    record: dict[str, Any] = field(default_factory=dict)
    state_digest: str = "digest"


@pytest.fixture
def links() -> Iterator[Links]:
    links = Links(Engine(1), KEY, is_sealed=True)
    yield links
    links.engine.close()


@pytest.fixture
def target(redis_url: str, tmp_path: Path, links: Links) -> Iterator[Target]:
    """A node's port: its guardian in a thread, and a trainer's inbox."""
    with ExitStack() as stack:
        server = StateServer(Copy, lambda round: None, current_round=lambda: 7)
        stack.callback(server.close)

        def take_state(connection: Any, what: HandedOver) -> None:
            server.take(connection, what.keys)

        inbox = Inbox({Purpose.DATA: links.accept, Purpose.STATE: take_state})
        stack.callback(inbox.close)
        port = free_port()
        listen = ListenAddress("127.0.0.1", bind_port=port, run_key=KEY.secret.hex())
        guarded = stack.enter_context(closing(Guarded(an_order(tmp_path, redis_url, listen=listen))))
        inbox.attach(guarded.inbox.dup())
        yield Target(MEMBER, ("127.0.0.1", port), ("b#1",), KEY, RUN, None)


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.02)


def test_there_is_a_kind_of_message_for_each_purpose() -> None:
    assert all(f"{purpose.value}: speak" in kinds(tuple(Purpose)) for purpose in Purpose)


@pytest.mark.slow
def test_member_is_answered_by_a_held_store_after_every_kind_of_message(caplog: pytest.LogCaptureFixture) -> None:
    chance, said, calls = random.Random(1), Counter[str](), list[Call]()
    with HeldStore(KEY, RUN) as held:
        target, before = Target(STORE, ("127.0.0.1", held.port), ("b#1",), KEY, RUN, None), opened_by(os.getpid())
        known = kinds((Purpose.STORE,))
        for name in sorted(known) * TIMES:
            calls.append(Call(target, chance))
            with suppress(OSError, EOFError, HandshakeFailed):
                known[name](calls[-1])
                said[name] += 1
        assert {name: said[name] for name in known if name.startswith("store: ") and said[name] == 0} == {}
        with closing(connect(f"node://{held.place}", timeout_s=DEADLINE_S, key=KEY)) as member:
            assert member.set(f"zeroband:{{{RUN}}}:run", "1") and held.server.is_running
        for call in calls:
            call.socket.close()
        until(lambda: opened_by(os.getpid())[0] <= before[0] + 2, f"{before} and {opened_by(os.getpid())} are open")
    gc.collect()  # asyncio complains of a task that failed when it is collected
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("spoilt", ["", "header", "seal"])
def test_frames_of_a_member_are_read_and_only_damaged_ones_break_the_link(
    target: Target, links: Links, spoilt: str
) -> None:
    """So the tool's data on a stream reaches that point."""
    run = int.from_bytes(hashlib.sha256(RUN.encode()).digest()[:8], "big")
    header = FRAME.pack(0 if spoilt == "header" else MAGIC, 1, 1, 0, run, 5 << 16, 1, 1, 0, 0, 4)
    call = Call(target, random.Random(1))
    keys = call.shake_hands(Purpose.DATA)
    until(lambda: links.state("stranger#0").is_up, "a link")
    frame = call.frame(keys, header, b"data")
    call.say(frame if spoilt != "seal" else frame[:60] + bytes([frame[60] ^ 1]) + frame[61:])
    if spoilt:
        until(lambda: not links.state("stranger#0").is_up, "the end of the link")
    else:
        call.say(call.frame(keys, header, b"data"))
        assert links.state("stranger#0").is_up
    call.socket.close()


def test_requests_of_a_member_are_answered(target: Target) -> None:
    call = Call(target, random.Random(1))
    keys = call.shake_hands(Purpose.STATE)
    assert keys.open is not None
    call.say(call.record(keys, b"GET /state/8 HTTP/1.1\r\n\r\n"))
    answer = call.socket.recv(1 << 16)
    said = AESGCM(keys.open).decrypt(
        (1).to_bytes(12, "big"), answer[4 : 4 + int.from_bytes(answer[:4], "big")], answer[:4]
    )
    assert said.startswith(b"HTTP/1.1 404")
    call.socket.close()


@pytest.mark.slow
def test_honest_node_is_answered_after_every_kind_of_message(
    target: Target, open_store: Callable[..., RedisStore], caplog: pytest.LogCaptureFixture
) -> None:
    chance, said, calls = random.Random(1), Counter[str](), list[Call]()
    before = opened_by(os.getpid())
    known = kinds()
    for name in [*sorted(known) * TIMES, *["introduce_nonsense"] * 60]:  # which has most ways to go wrong
        calls.append(Call(target, chance))
        try:
            known[name](calls[-1])
        except (OSError, EOFError, HandshakeFailed):
            continue
        said[name] += 1
    assert {name: said[name] for name in known if said[name] == 0} == {}
    for purpose in GUARDED:
        honest = Call(target, chance)
        assert honest.shake_hands(purpose).seal is not None
        calls.append(honest)
    for call in calls:
        call.socket.close()
    until(lambda: opened_by(os.getpid())[0] <= before[0] + 2, f"{before} and {opened_by(os.getpid())} are open")
    assert MEMBER in open_store(RUN).view(0).alive
    gc.collect()  # asyncio complains of a task that failed when it is collected
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
