"""The board over a made-up run of four nodes, whose facts it learns up to the moment that a test sets.

Seconds of the run: nodes come in from 0 on, the founding is committed at 10; node2 is killed after 300, late from 310
on, lost from 312 on, starts again at 330, fetches the state from 334 to 346, and is a member again from 350 on; the run
ends at 600.
"""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

import uvicorn
from tests.made_runs import BEGIN_S, MadeFacts, event, step

from zeroband.errors import ConfigError
from zeroband.observe.facts import Fact
from zeroband.tools.board.app import build_app
from zeroband.tools.board.document import RunContext
from zeroband.tools.board.orders import OrderDesk
from zeroband.tools.board.state import RunWatch
from zeroband.tools.ctl import Order

NODES = ("node0", "node1", "node2", "node3")
VICTIM = "node2"
STARTED_S = {"node0": 0.0, "node1": 2.0, "node2": 4.0, "node3": 7.0}
STALLED_S, LATE_S, LOST_S, AGAIN_S, FETCHING_S, FETCHED_S, BACK_S = 303.0, 310.0, 312.0, 330.0, 334.0, 346.0, 350.0
HEALED_S, END_S = 420.0, 600.0
ROUND_S, STEPS, SAMPLES, TOKENS = 10, 10, 4, 65_536
"""Of a round: seconds, inner steps, samples of a member; tokens of a node in a step."""
LAST_ROUND = 59
WITHOUT_VICTIM = range(30, 35)
"""Rounds."""
PARAMETERS = 14_700_000
STATE_BYTES = 4 * PARAMETERS
SAMPLE = "The harbour was quiet, and the boats came in one after another before the weather turned."
TOKEN = "the run's token"


def member(node_id: str, number: int) -> str:
    """Member id of a node in a round."""
    return f"{node_id}#{2 if node_id == VICTIM and number >= WITHOUT_VICTIM.stop else 1}"


def members(number: int) -> list[str]:
    """Members of a round."""
    return [member(n, number) for n in NODES if n != VICTIM or number not in WITHOUT_VICTIM]


def round_of(node_id: str, number: int, samples: int) -> Iterator[Fact]:
    """A round of a node, after which the run has trained so many samples, and the inner steps before it."""
    at_s, who = 10.0 + ROUND_S * number, members(number)
    used = SAMPLES if number else 0
    epoch = 1 + (number >= WITHOUT_VICTIM.start) + (number >= WITHOUT_VICTIM.stop)
    tokens = number * STEPS * TOKENS * len(NODES)
    ledger = {"next": samples, "returned": [], "assigned": {}}
    progress = {"inner_step": STEPS * number, "tokens": tokens, "founding": "line", "follows": None}
    yield event(
        node_id, at_s, "round_committed", round=number, epoch=epoch, members=who, digest=f"{number:08x}",
        weights=[used] * len(who), samples=[used] * len(who), progress={**progress, "ledgers": {"": ledger}},
        late=[member(VICTIM, number)] if number == WITHOUT_VICTIM.start else [],
    )  # fmt: skip
    for i in range(1, STEPS + 1) if number else ():
        if number == WITHOUT_VICTIM.start and i < STEPS:
            continue  # all wait for the victim
        then_s = at_s - STEPS + i
        loss = 3.0 + 6.0 * math.exp(-then_s / 75)
        values = {"train__loss": loss, "train__tokens_per_s": 31_400.0, "train__step_s": 0.9, "train__mfu": 0.407}
        values |= {"train__tokens": tokens, "node__rss_bytes": 9.3e9}
        if i == STEPS:
            sent = 6 * PARAMETERS
            values |= {"outer__round": number, "outer__epoch": epoch, "outer__nodes": len(who)}
            values |= {"outer__wait_s": 0.9, "outer__transfer_s": 1.0, "outer__apply_s": 0.15, "outer__blocked_s": 0.9}
            values |= {"outer__sent_bytes": sent, "outer__received_bytes": sent, "outer__ddp_bytes": 40 * sent}
            values |= {"eval__step": STEPS * number, "eval__loss": loss + 0.1} if number % 5 == 0 else {}
        yield step(node_id, then_s, STEPS * (number - 1) + i, **values)


def links_of(node_id: str, at_s: float, others: tuple[str, ...], *, is_cut: bool = False) -> Fact:
    """What a node measured; `is_cut`: it does not reach the victim."""
    links = [
        {"to": f"{other}#1", "mbit_s": 60.0 + at, "rtt_ms": 12.0, "is_cut_off": is_cut and other == VICTIM}
        for at, other in enumerate(others)
        if other != node_id
    ]
    return event(node_id, at_s, "links", links=links)


def start_of(node_id: str, at_s: float) -> list[Fact]:
    return [
        event(node_id, at_s, "node_started", total_steps=STEPS * LAST_ROUND, parameters=PARAMETERS, detect_s=5.0),
        event(node_id, at_s + 2, "joined", member_id=f"{node_id}#1", round=0),
    ]


def facts_of_run(sample: str, extra_nodes: int) -> Iterator[Fact]:
    """All facts of the run. `extra_nodes`: more of them, which train beside the rounds from second 12 on."""
    others = tuple(f"node{number}" for number in range(len(NODES), len(NODES) + extra_nodes))
    for node_id in NODES:
        yield from start_of(node_id, STARTED_S[node_id])
        yield links_of(node_id, 12.0, (*NODES, *others))
    samples = 0
    for number in range(LAST_ROUND + 1):
        samples += SAMPLES * len(members(number)) if number else 0
        for name in members(number):
            yield from round_of(name.partition("#")[0], number, samples)
        if number % 10 == 0 and number:
            saved = {"round": number, "step": STEPS * number, "bytes": 3 * STATE_BYTES, "took_s": 1.8}
            yield event("node0", 11.8 + ROUND_S * number, "checkpoint_committed", **saved)
    for node_id in others:
        yield from start_of(node_id, 10.0)
        yield links_of(node_id, 12.0, (*NODES, *others))
        yield from (step(node_id, 10.0 * at, at) for at in range(2, 60))
    yield event("node0", 63.0, "sample_written", path="sample.txt", text=sample)
    yield from loss_and_return()
    yield from (event(node_id, END_S, "run_finished", step=STEPS * LAST_ROUND) for node_id in NODES)


def loss_and_return() -> Iterator[Fact]:
    lost, first = [member(VICTIM, 0)], WITHOUT_VICTIM.start
    stalled = {"waiting_for": lost, "since_s": 2, "at_byte": 0, "of_bytes": 9, "reason": "silent"}
    yield event("node0", STALLED_S, "transfer_stalled", round=first, **stalled)
    for node_id in ("node0", "node1", "node3"):
        yield event(node_id, LOST_S, "peer_lost", round=first + 1, member_ids=lost)
        yield links_of(node_id, LOST_S, NODES, is_cut=True)
        yield links_of(node_id, BACK_S, NODES)
    yield event("node0", LOST_S, "round_retried", round=first + 1, reason="a member was lost")
    yield start_of(VICTIM, AGAIN_S)[0]
    yield event(VICTIM, FETCHING_S, "join_state", state="fetching", why="", since=FETCHING_S)
    yield event(
        VICTIM, FETCHING_S + 6, "join_progress", bytes=STATE_BYTES // 2, of_bytes=STATE_BYTES, bytes_per_s=4.9e6
    )
    yield event(VICTIM, FETCHED_S, "recovered", round=33, digest=f"{33:08x}", took_s=12.0)
    yield event(VICTIM, BACK_S, "join_state", state="member", why="", since=FETCHING_S)
    yield event(VICTIM, BACK_S, "joined", member_id=member(VICTIM, WITHOUT_VICTIM.stop), round=WITHOUT_VICTIM.stop)


@contextmanager
def served(app: Any, *, port: int = 0, http: Any = "auto") -> Generator[tuple[str, int]]:
    """Serve an app on loopback; gives the address. `http`: uvicorn's class of a connection."""
    server = uvicorn.Server(uvicorn.Config(app, http=http, lifespan="off", ws="none", log_level="critical"))
    with socket.create_server(("127.0.0.1", port), backlog=1024) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="board")
        thread.start()
        try:
            yield listener.getsockname()
        finally:
            server.force_exit = server.should_exit = True
            thread.join()


class Board:
    """Serves the run as it is known at second `now_s`; the clocks stand still between two calls.

    `names`: other names for nodes. `problem`: what cannot be read. `has_run`: False: the board finds none yet.
    """

    def __init__(
        self,
        now_s: float = HEALED_S,
        *,
        run_id: str = "amber-heron",
        names: Mapping[str, str] | None = None,
        sample: str = SAMPLE,
        extra_nodes: int = 0,
        problem: str | None = None,
        takes_orders: bool = True,
        has_run: bool = True,
    ) -> None:
        self.source = MadeFacts()
        self.source.run_id, self.source.cannot = run_id, [] if problem is None else [problem]
        self.has_run = has_run
        self.orders: list[Order] = []
        """Orders that were accepted."""
        self.refusal: str | None = None
        """Why the run refuses orders, if it does."""
        facts = (renamed(fact, names or {}) for fact in facts_of_run(sample, extra_nodes))
        self._facts = sorted(facts, key=lambda fact: fact.record["at_s"])
        self._now_s, self._clock_s = now_s, 1000.0
        desk = OrderDesk(TOKEN, self._give) if takes_orders else OrderDesk(None, None)
        self._watch = RunWatch(
            lambda: self.source if self.has_run else None,
            setting=RunContext(price_per_hour=2.9, orders_allowed=desk.is_open, orders_why=desk.why),
            now=lambda: BEGIN_S + self._now_s,
            clock=lambda: self._clock_s,
            work_s=lambda: 0.0,
        )
        self._app = build_app(self._watch, desk)
        self._port, self._serving = 0, ExitStack()
        self.tell(now_s)

    def _give(self, order: Order) -> str:
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        self.orders.append(order)
        return "In force from the next round on"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}/"

    def tell(self, now_s: float) -> None:
        """Let what was recorded up to this second arrive; the open streams are told."""
        until = sum(fact.record["at_s"] <= BEGIN_S + now_s for fact in self._facts)
        self.source.facts += self._facts[:until]
        self._facts = self._facts[until:]
        self.wait(now_s - self._now_s)

    def wait(self, seconds: float) -> None:
        """Let time pass, enough for another document."""
        self._now_s += seconds
        self._clock_s += max(20.0, seconds)
        self._watch.look()
        self._watch.state()

    def start(self) -> None:
        _, self._port = self._serving.enter_context(served(self._app, port=self._port))

    def stop(self) -> None:
        """Break off all connections; another `start` listens on the same port."""
        self._serving.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def renamed(value: Fact, names: Mapping[str, str]) -> Fact:
    """A fact of nodes with other names."""

    def of(part: object) -> object:
        if isinstance(part, dict):
            return {key: of(item) for key, item in part.items()}
        if isinstance(part, list):
            return [of(item) for item in part]
        if isinstance(part, str):
            node_id, mark, incarnation = part.partition("#")
            return names.get(node_id, node_id) + mark + incarnation
        return part

    return Fact(names.get(value.node_id, value.node_id), {key: of(item) for key, item in value.record.items()})
