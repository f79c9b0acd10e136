"""How the page follows a run: what is made when, who is told, and what is said of what cannot be read."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from tests.made_runs import BEGIN_S, MadeFacts, event, joined, member, run_of, step

from zeroband.errors import StoreLost
from zeroband.observe.facts import Fact
from zeroband.tools.board.state import EDITION_S, LOOK_S, RunWatch

NODES = ("a", "b", "c", "d")


class Followed:
    """A run that is followed by clocks that the test sets."""

    def __init__(self, facts: Sequence[Fact], *, document_s: float = 0.0) -> None:
        self.source = MadeFacts(facts)
        self.clock_s = 1000.0
        self.worked_s = 0.0
        self.document_s = document_s
        """Work of a document."""
        self.watch = RunWatch(
            lambda: self.source, now=lambda: BEGIN_S + 5000, clock=lambda: self.clock_s, work_s=self._work_s
        )
        self.watch.look()

    def _work_s(self) -> float:
        self.worked_s += self.document_s
        return self.worked_s

    def tell(self, *facts: Fact) -> None:
        self.source.facts = list(facts)
        self.watch.look()

    def state(self) -> dict[str, Any]:
        return json.loads(self.watch.state().body)

    def after(self, seconds: float) -> dict[str, Any]:
        self.clock_s += seconds
        return self.state()


def of_run(rounds: int = 5, **how: float) -> Followed:
    return Followed([fact for facts in run_of(NODES, rounds) for fact in facts], **how)


def lost(node_id: str) -> Fact:
    return event("a", 30, "peer_lost", round=6, member_ids=[member(node_id)])


def standings(state: dict[str, Any]) -> dict[str, str]:
    return {node["id"]: node["state"] for node in state["nodes"]}


def test_document_that_is_work_is_made_seldom() -> None:
    run = of_run(document_s=0.01)
    run.state()
    run.tell(step("a", 11, 6))
    assert run.after(EDITION_S)["run"]["step"] == 5
    assert run.after(10.0)["run"]["step"] == 6


def test_loss_of_a_node_is_in_the_next_document_however_much_work_that_is() -> None:
    run = of_run(document_s=10.0)
    run.state()
    run.tell(lost("c"))
    assert standings(run.after(LOOK_S))["c"] == "lost"


def test_edition_is_told_when_it_is_what_is_served_and_not_before() -> None:
    run = of_run(document_s=0.01)
    run.state()
    seen: list[tuple[int, int]] = []
    with run.watch.telling(lambda: seen.append((run.watch.edition, run.state()["run"]["step"]))):
        run.tell(step("a", 11, 6))
        assert run.after(EDITION_S)["run"]["step"] == 5
        assert seen == []
        run.after(10.0)
        assert seen == [(2, 6)]
        run.after(0.1)
    run.tell(step("a", 12, 7))
    run.after(10.0)
    assert seen == [(2, 6)]


def test_follower_makes_what_is_due_although_nobody_asks_and_nothing_comes_any_more() -> None:
    """So that whoever listens hears of the last thing that a run said before it went quiet."""
    source = MadeFacts([fact for facts in run_of(NODES, 5) for fact in facts])
    watch = RunWatch(lambda: source, now=lambda: BEGIN_S + 5000)
    heard = {5: threading.Event(), 6: threading.Event()}
    with watch.telling(lambda: heard[json.loads(watch.state().body)["run"]["step"]].set()):
        watch.start()
        try:
            assert heard[5].wait(20.0)
            source.facts = [step("a", 11, 6)]
            assert heard[6].wait(20.0)
        finally:
            watch.close()


def test_run_that_falls_silent_is_said_to_be_so() -> None:
    run = of_run()
    run.tell(step("a", 11, 6))
    assert run.state()["run"]["state"] == "training"
    quiet = run.after(70.0)
    assert (quiet["run"]["state"], quiet["age_s"]) == ("stalled", 70.0)
    assert quiet["waiting_for"]["nodes"] == ["b", "c", "d"]


def test_age_counts_from_the_arrival_of_what_is_new() -> None:
    source = MadeFacts(joined("a", 0))
    watch = RunWatch(lambda: source, now=lambda: BEGIN_S + 1000)
    source.is_piece = True  # the past may come in pieces
    assert watch.look()
    source.facts, source.is_piece = [event("a", 1, "joined", member_id="a#1", round=0)], False
    assert not watch.look()
    assert json.loads(watch.state(BEGIN_S + 1).body)["age_s"] == 999
    source.facts = [event("a", 2, "left", reason="done")]
    watch.look()
    assert json.loads(watch.state(BEGIN_S + 2).body)["age_s"] < 100


def test_store_that_is_away_is_said_and_comes_back() -> None:
    run = Followed(joined("a", 0))
    run.source.problem = StoreLost("the store is away")
    run.tell()
    assert run.after(EDITION_S)["problem"] == "the store is away"
    run.source.problem = None
    run.tell(event("a", 5, "left", reason="done"))
    state = run.after(EDITION_S)
    assert (state["problem"], state["nodes"][0]["state"]) == (None, "left")


def test_what_cannot_be_read_is_said_beside_what_can() -> None:
    run = Followed(joined("a", 0))
    run.source.cannot = ["b/metrics.jsonl: Is a directory"]
    run.tell()
    state = run.after(EDITION_S)
    assert state["problem"] == "cannot read b/metrics.jsonl: Is a directory"
    assert standings(state) == {"a": "training"}


def test_run_of_which_nothing_can_be_read_is_not_said_to_have_recorded_nothing() -> None:
    run = Followed([])
    run.source.cannot = ["n0: sealed with another run.token"]
    run.tell()
    state = run.after(EDITION_S)
    assert (state["run"]["state"], state["run"]["words"]) == ("waiting", "Nothing of this run could be read yet.")


@pytest.mark.parametrize("begin_s", [30.0, -30.0], ids=["later", "earlier"])
def test_another_run_of_the_name_is_said_and_counted_nowhere(begin_s: float) -> None:
    ours = [fact for facts in run_of(("a", "b"), 5, line="ours") for fact in facts]
    theirs = [fact for facts in run_of(("x", "y"), 20, begin_s=begin_s, line="theirs") for fact in facts]
    run = Followed([*ours, *theirs])
    run.tell(event("b", 60, "links", links=[]))  # so that something came just now
    shown = run.state()["run"]
    others, step_, round_ = ("a, b", 20, 20) if begin_s > 0 else ("x, y", 5, 5)
    assert (shown["step"], shown["round"], shown["tokens_per_s"]) == (step_, round_, 200.0)
    assert shown["words"] == f"2 nodes in, 2 nodes seen. {others} belong to another run named run and are not counted."
    assert len(run.state()["nodes"]) == 4
    waits = run.after(100.0)["waiting_for"]
    assert waits["nodes"] == [] and "No member" in waits["words"]  # and nobody for one who is behind the other run
