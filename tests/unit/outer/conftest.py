"""A run of several nodes in one process: one thread each, and a store and lanes in memory.

The rules (`elastic.epoch`), the mesh (`ElasticDeviceMesh`), the shared buffers and the algorithms are the real ones.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zeroband.config.schema import DdpConfig, DilocoConfig, ElasticConfig, OptimConfig
from zeroband.elastic.board import NodeBoard
from zeroband.elastic.epoch import Opening, Ready, Verdict, View, Wait, must_leave, next_opening, next_verdict
from zeroband.elastic.groups import LaneGroups, LaneOwnership
from zeroband.elastic.member import Member
from zeroband.elastic.mesh import ElasticDeviceMesh
from zeroband.elastic.progress import RunShape
from zeroband.errors import Fenced, PeerLost
from zeroband.faults import FaultPoints
from zeroband.optim import InnerOptimizer
from zeroband.outer.base import OuterAlgorithm, OuterParts
from zeroband.outer.ddp import Ddp
from zeroband.outer.diloco import DiLoCo
from zeroband.outer.flat import FlatLayout, ShardMap, SharedBuffers
from zeroband.outer.journal import Journal
from zeroband.parallel import LocalMesh, init_local_mesh

DEADLINE_S = 20.0


class NodeDied(Exception):
    """Stands for SIGKILL: ends a node's thread."""


class FakeStore:
    """The run's record; every change wakes all who wait."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.openings: list[Opening] = []
        self.verdicts: list[Verdict] = []
        self.alive: set[str] = set()
        self.ready: dict[int, dict[str, Ready]] = {}
        self.votes: dict[int, dict[str, str]] = {}
        self.failed: dict[int, str] = {}
        self.sent: dict[tuple[int, int], dict[str, Tensor]] = {}
        """(version, lane) -> what each member put into the all-reduce."""

    def view(self, round: int) -> View:
        opening = self.openings[-1] if self.openings else None
        version = opening.version if opening else 0
        return View(
            opening=opening,
            committed=self.verdicts[-1] if self.verdicts else None,
            alive=frozenset(self.alive),
            ready=dict(self.ready.get(round, {})),
            votes=dict(self.votes.get(version, {})),
            failed=self.failed.get(version),
        )

    def wait_for(self, decide: Callable[[], Any]) -> Any:
        """The first answer of `decide` that is not a Wait."""
        with self.changed:
            outcome: list[Any] = []

            def is_decided() -> bool:
                outcome[:] = [decide()]
                return not isinstance(outcome[0], Wait)

            assert self.changed.wait_for(is_decided, timeout=DEADLINE_S), outcome
            return outcome[0]

    def change(self, change: Callable[[], Any]) -> None:
        with self.changed:
            change()
            self.changed.notify_all()


class FakeMember:
    """`Member` without a lease, a guardian and polling."""

    def __init__(self, store: FakeStore, member_id: str) -> None:
        self.member_id = member_id
        self._store = store
        store.change(lambda: store.alive.add(member_id))

    def announce_ready(self, ready: Ready) -> None:
        self._store.change(lambda: self._store.ready.setdefault(ready.round, {}).setdefault(self.member_id, ready))

    def await_opening(self, round: int, elastic: ElasticConfig, *, start_deadline_s: float) -> Opening:
        def decide() -> Opening | Wait:
            excluded = must_leave(self._store.view(round), self.member_id, round)
            if excluded is not None:
                raise Fenced(excluded.reason)
            return self._decide_opening(round, elastic)

        return self._store.wait_for(decide)

    def await_admission(self, round: int, elastic: ElasticConfig) -> Opening | Verdict:
        def decide() -> Opening | Verdict | Wait:
            committed = self._store.view(round).committed
            if committed is not None and committed.round >= round:
                return committed
            return self._decide_opening(round, elastic)

        return self._store.wait_for(decide)

    def _decide_opening(self, round: int, elastic: ElasticConfig) -> Opening | Wait:
        view = self._store.view(round)
        decision = next_opening(
            view, round, min_nodes=elastic.min_nodes, start_nodes=elastic.start_nodes, start_timed_out=False
        )
        if isinstance(decision, Wait):
            return decision
        if decision != view.opening:
            self._store.openings.append(decision)
            self._store.changed.notify_all()
        return decision if self.member_id in decision.members else Wait("open to others")

    def vote(self, opening: Opening, digest: str) -> None:
        votes = self._store.votes.setdefault(opening.version, {})
        self._store.change(lambda: votes.setdefault(self.member_id, digest))

    def await_verdict(self, opening: Opening, payload: Mapping[str, Any]) -> Verdict:
        def decide() -> Verdict | Wait:
            view = self._store.view(opening.round)
            if view.committed is not None and view.committed.round >= opening.round:
                if view.committed.version == opening.version:
                    return view.committed
                raise Fenced(f"round {opening.round} was committed without {self.member_id}")
            self._store.check(opening)
            decision = next_verdict(view, opening, payload)
            if decision is None:
                self._store.failed.setdefault(opening.version, "the members hold different results")
                self._store.changed.notify_all()
                return Wait("results differ")
            if isinstance(decision, Verdict):
                self._store.verdicts.append(decision)
                self._store.changed.notify_all()
            return decision

        return self._store.wait_for(decide)

    def report_failure(self, opening: Opening, reason: str) -> None:
        self._store.change(lambda: self._store.failed.setdefault(opening.version, reason))

    def watch(self, opening: Opening | None) -> None:
        """Nothing: the fake lanes look at the store themselves."""

    def close(self) -> None:
        self._store.change(lambda: self._store.alive.discard(self.member_id))


def _check(store: FakeStore, opening: Opening) -> None:
    view = store.view(opening.round)
    if view.opening is None or view.opening.version != opening.version:
        raise PeerLost("opened again")
    if view.failed is not None:
        raise PeerLost(view.failed)
    lost = [m for m in opening.members if m not in view.alive and m not in view.votes]
    if lost:
        raise PeerLost(f"{', '.join(lost)} lost during round {opening.round}")


FakeStore.check = _check  # type: ignore[attr-defined]
