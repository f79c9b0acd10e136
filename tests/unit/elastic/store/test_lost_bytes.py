"""The store over a plain connection that loses, inserts or changes one byte, at each place that counts.

Never a wrong answer, never an error, at most another connection.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from tests.relay import Damage, Relay, Wound
from tests.stores import free_port

from zeroband.elastic.membership.records import Peer, Ready, RoundPlan, Verdict, View
from zeroband.elastic.store import redis_run
from zeroband.elastic.store.connection import connect
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.tools.cluster import RedisServer

RETRY_S = 60.0
LEASE_S = 600.0
ANSWER_S = 0.1
"""Longest wait for an answer, by which most missing bytes are noticed."""
WAYS = 8
RUN = "run"


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of a server in which one round is committed and the next one open."""
    port = free_port()
    with (
        RedisServer(host="127.0.0.1", port=port) as redis,
        contextlib.closing(RedisStore(redis.url, RUN, lease_s=LEASE_S, retry_s=5)) as run,
    ):
        for member in ("a#1", "b#1"):
            assert run.renew_lease(member, Peer(member[0], "127.0.0.1", 1, True), first=True)
        first, second = (RoundPlan(n + 1, n + 1, n, ("a#1", "b#1"), (1, 1), (1, 1), (1, 1)) for n in (0, 1))
        assert run.propose_plan(first, current=None) and run.propose_verdict(Verdict(first, "d", {"n": 1}))
        assert run.propose_plan(second, current=first)
        run.vote(second, "a#1", "e")
        yield port


@dataclass
class Way:
    """A relay to the server, and a store that uses it."""

    relay: Relay
    store: RedisStore

    def close(self) -> None:
        self.store.close()
        self.relay.close()


@pytest.fixture
def ways(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Way]]:
    monkeypatch.setattr(redis_run, "connect", lambda url, timeout_s, key: connect(url, timeout_s=ANSWER_S))
    with contextlib.ExitStack() as stack:
        opened: list[Way] = []
        for _ in range(WAYS):
            relay = Relay(server)
            way = Way(relay, RedisStore(f"redis://127.0.0.1:{relay.port}", RUN, lease_s=LEASE_S, retry_s=RETRY_S))
            stack.callback(way.close)
            opened.append(way)
            way.store.reach(retry_s=RETRY_S)
            way.store.view(1)
        yield opened


def places_of(said: bytes, wound: Wound) -> list[int]:
    """The places of all bytes that are no payload, and of the first and the last one of each payload.

    A payload that was changed on the way, or a number that was made another one that is possible, looks like any other:
    that is what TLS is for.
    """
    places, at = list[int](), 0
    while at < len(said):
        line = re.compile(rb"([*$:+-])(-?\d*).*?\r\n").match(said, at)
        assert line is not None, said[at:]
        places += range(at, line.end())
        at = line.end()
        if line[1] == b"$" and line[2] != b"-1":
            size = int(line[2])
            places += {at, at + size - 1} if size and wound != Wound.CHANGE else ()
            places += (at + size, at + size + 1)
            at += size + 2
    return places


def at_each(ways: list[Way], damages: list[Damage], look: Callable[[Way, int], None]) -> None:
    """Apply each damage to a relay while `look` runs there with its number."""
    left, lock = list(enumerate(damages)), threading.Lock()

    def walk(way: Way) -> None:
        while True:
            with lock:
                if not left:
                    return
                number, damage = left.pop()
            way.relay.damage = damage
            look(way, number)
            assert damage.done, f"{damage} did not happen"

    with ThreadPoolExecutor(len(ways)) as pool:
        for done in [pool.submit(walk, way) for way in ways]:
            done.result()


@pytest.mark.slow
@pytest.mark.parametrize("wound", list(Wound))
def test_view_is_right_despite_any_damaged_byte_of_an_answer(ways: list[Way], wound: Wound) -> None:
    right = ways[0].store.view(1)
    answer = ways[0].relay.heard["server"]
    places = places_of(answer, wound)
    assert right.plan is not None and right.votes == {"a#1": "e"} and len(places) > 100

    def look(way: Way, number: int) -> None:
        seen: list[View] = [way.store.view(1) for _ in range(2)]
        assert seen == [right, right], f"{damages[number]} of {answer!r}"

    damages = [Damage(wound, place) for place in places]
    at_each(ways, damages, look)


@pytest.mark.slow
@pytest.mark.parametrize("wound", [Wound.DROP, Wound.CUT])
def test_record_is_written_intact_despite_lost_bytes(ways: list[Way], wound: Wound) -> None:
    """The first record counts, so a wrong one would stay."""
    ways[0].store.announce_ready("a#1", Ready(1000, 5, "state"))
    places = places_of(ways[0].relay.heard["client"], wound)
    assert len(places) > 100

    def look(way: Way, number: int) -> None:
        said = Ready(2000 + number + 1000 * list(Wound).index(wound), 5, "state")
        seen = way.store.announce_ready("a#1", said)
        assert seen.ready == {"a#1": said}, damages[number]

    damages = [Damage(wound, place, of="client") for place in places]
    at_each(ways, damages, look)


@pytest.mark.slow
@pytest.mark.parametrize("wound", list(Wound))
def test_lease_is_renewed_despite_any_damaged_byte_of_an_answer(ways: list[Way], wound: Wound) -> None:
    """A wrong answer would fence a member."""
    peer = Peer("a", "127.0.0.1", 1, True)
    right = ways[0].store.renew_lease("a#1", peer)
    places = places_of(ways[0].relay.heard["server"], wound)
    assert right is not None and right["a#1"] == peer

    def look(way: Way, number: int) -> None:
        assert way.store.renew_lease("a#1", peer) == right, damages[number]

    damages = [Damage(wound, place) for place in places]
    at_each(ways, damages, look)
