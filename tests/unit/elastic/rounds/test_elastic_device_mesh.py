"""What the ranks of a node learn of the run: the same, whatever the store shows to whom."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroband.elastic.membership.records import RoundPlan, Verdict
from zeroband.elastic.membership.round_rules import Rules
from zeroband.elastic.rounds import elastic_device_mesh as module
from zeroband.elastic.rounds.elastic_device_mesh import ElasticDeviceMesh
from zeroband.errors import Fenced
from zeroband.node.mesh import LocalMesh
from zeroband.node.shared_flags import SharedFlags

SEEN = RoundPlan(
    version=4, epoch=2, round=3, members=("a#1", "b#1"), weights=(10, 20), steps=(1, 2), steps_requested=(1, 2)
)
ANOTHER = replace(SEEN, version=5, members=("a#1", "c#1"))


class SeeingMember:
    """A membership that sees one plan and no other."""

    def __init__(self, rank: int) -> None:
        self.member_id = f"a#{rank + 1}"
        self._plan = SEEN if rank == 0 else ANOTHER
        self._rank = rank

    def await_turn(self, round: int, *_: object, **__: object) -> RoundPlan | Verdict:
        if round == self._plan.round:
            return self._plan
        raise Fenced(f"rank {self._rank} was voted out")

    def vote(self, *_: object) -> None:
        """Nothing: the others agree."""

    def await_verdict(self, plan: RoundPlan, payload: dict[str, Any]) -> Verdict:
        return Verdict(self._plan, "digest", payload)

    def watch(self, *_: object) -> None:
        """Nothing to abort."""


@pytest.fixture
def on_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Do the same on both ranks of a node, a thread for each; what it gave or raised, by rank.

    Rank 1 is given a membership of its own, which sees another world: it must not be asked.
    """
    said: queue.Queue[str] = queue.Queue()

    def broadcast(value: Any, local: LocalMesh) -> Any:
        text = json.dumps(value) if local.rank == 0 else said.get(timeout=10)
        if local.rank == 0:
            said.put(text)
        return json.loads(text)

    monkeypatch.setattr(module, "broadcast_json", broadcast)
    flags = SharedFlags(tmp_path / "flags", create=True)

    def run(work: Callable[[ElasticDeviceMesh], Any]) -> list[Any]:
        def on_rank(rank: int) -> Any:
            local: Any = LocalMesh(rank, 2, torch.device("cpu"), *[None] * 2)  # type: ignore[arg-type]
            member, groups = SeeingMember(rank), None
            mesh = ElasticDeviceMesh(local, member, groups, flags, Rules(), start_timeout_s=1.0, trainer=local)  # type: ignore[arg-type]
            try:
                return work(mesh)
            except Fenced as error:
                return str(error)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(on_rank, range(2)))

    return run


@pytest.mark.defect(5)
def test_all_ranks_take_part_in_the_plan_that_the_first_one_saw(on_both: Callable[..., list[Any]]) -> None:
    assert on_both(lambda mesh: mesh.await_turn(3, is_member=True)) == [SEEN, SEEN]
    assert on_both(lambda mesh: mesh.member_id) == ["a#1", "a#1"]


@pytest.mark.defect(5)
def test_all_ranks_apply_the_verdict_that_the_first_one_saw(on_both: Callable[..., list[Any]]) -> None:
    expected = Verdict(SEEN, "digest", {"n": 1})

    def vote(mesh: ElasticDeviceMesh) -> Verdict:
        mesh.vote(SEEN, "digest", {"n": 1})
        return mesh.await_verdict(SEEN, {"n": 1})

    assert on_both(vote) == [expected, expected]


@pytest.mark.defect(5)
def test_all_ranks_end_by_the_error_of_the_first_one(on_both: Callable[..., list[Any]]) -> None:
    assert on_both(lambda mesh: mesh.await_turn(4, is_member=True)) == ["rank 0 was voted out"] * 2
