"""What nodes that differ do to a round: other numbers of inner steps, leaving, joining while rounds go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.config.outer import CustomConfig, DdpConfig, DemoConfig, DilocoConfig, OuterSGDConfig, SparseLocoConfig
from zeroband.data.ledger import SHARED
from zeroband.elastic.membership.records import Peer
from zeroband.errors import Fenced, RecoveryFailed, RunOver
from zeroband.state.digest import digest_of

DDP = DdpConfig(type="ddp")
StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]


def diloco(inner_steps: int = 1) -> DilocoConfig:
    return DilocoConfig(type="diloco", inner_steps=inner_steps, optimizer=OuterSGDConfig(lr=0.7, momentum=0.9))


SPARSELOCO = SparseLocoConfig(type="sparseloco", inner_steps=1)
FED_ADAM = Path(__file__).resolve().parents[3] / "examples" / "fed_adam.py"
CUSTOM = CustomConfig(type="custom", algorithm=str(FED_ADAM), inner_steps=1)
Algorithm = DilocoConfig | DdpConfig | DemoConfig | SparseLocoConfig | CustomConfig
ALGORITHMS = pytest.mark.parametrize(
    "algorithm",
    [diloco(), DDP, DemoConfig(type="demo"), SPARSELOCO, CUSTOM],
    ids=["diloco", "ddp", "demo", "sparseloco", "custom"],
)
STEP_ALGORITHMS = pytest.mark.parametrize("algorithm", [DDP, DemoConfig(type="demo")], ids=["ddp", "demo"])
"""With these every step is a round, so that a joiner has to be in one before it can train."""


def trains_first(algorithm: Algorithm) -> bool:
    return not isinstance(algorithm, DdpConfig | DemoConfig)


def sequence(noise: Noise, first: int, steps: int) -> list[Tensor]:
    return [noise(seed) for seed in range(first, first + steps)]


# -- unequal steps --------------------------------------------------------------------------------------------------


def test_nodes_are_dealt_the_samples_of_their_own_steps(start_run: StartRun) -> None:
    run = start_run(diloco(inner_steps=4), "a", "b", pace={"b": 2})
    assert run["a"].outer.progress.assigned == {"a": ((0, 16),), "b": ((16, 24),)}


def test_unequal_steps_weigh_by_their_tokens(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=4), "a", "b", pace={"b": 2})
    theta, updates = run["a"].params, {"a": sequence(noise, 0, 4), "b": sequence(noise, 10, 2)}
    reports = run.together(
        a=lambda: run["a"].take_steps(updates["a"], 10), b=lambda: run["b"].take_steps(updates["b"], 10)
    )
    inner = {"a": theta, "b": theta}
    for name, steps in updates.items():
        for update in steps:
            inner[name] = inner[name] + update
    mean = torch.zeros(22) + (theta - inner["a"]) * (40 / 60) + (theta - inner["b"]) * (20 / 60)
    expected = theta - (mean * 0.9 + mean) * 0.7
    for name, report in reports.items():
        assert (report.weights, report.samples, report.state_digest) == ((40, 20), (16, 8), digest_of(expected, mean))
        assert torch.equal(run[name].params, expected)


def test_run_advances_by_the_most_steps_and_slower_nodes_follow_its_schedule(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=4), "a", "b", pace={"b": 2}, total_steps=8)
    run.together(
        a=lambda: run["a"].take_steps(sequence(noise, 0, 4), 10),
        b=lambda: run["b"].take_steps(sequence(noise, 10, 2), 10),
    )
    assert {node.outer.progress.inner_step for node in run.nodes.values()} == {4}
    assert {node.inner.step_count for node in run.nodes.values()} == {4}
    assert run["a"].inner.lr == run["b"].inner.lr < run.add("fresh").inner.lr


def test_samples_that_were_not_used_are_the_first_to_be_dealt_again(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=4), "a", "b")
    assert run["b"].outer.progress.assigned == {"a": ((0, 16),), "b": ((16, 32),)}
    report = run.together(
        a=lambda: run["a"].take_steps(sequence(noise, 0, 4), 10), b=lambda: run["b"].take_step(noise(9), 10)
    )["a"]
    assert report.samples == (16, 4)
    assert report.progress.assigned == {"a": ((20, 36),), "b": ((36, 52),)}  # 20..32 were b's
    assert report.progress.ledgers[SHARED].returned == ()


def test_nodes_ask_for_no_more_steps_than_the_run_has_left(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=4), "a", "b", pace={"b": 2}, total_steps=6)
    run.together(
        a=lambda: run["a"].take_steps(sequence(noise, 0, 4), 10),
        b=lambda: run["b"].take_steps(sequence(noise, 10, 2), 10),
    )
    assert [run.store.view(1).ready[name].steps_requested for name in ("a", "b")] == [2, 2]
    assert run["a"].dealt_steps == run["b"].dealt_steps == 2
    reports = run.together(
        a=lambda: run["a"].take_steps(sequence(noise, 20, 2), 10),
        b=lambda: run["b"].take_steps(sequence(noise, 30, 2), 10),
    )
    assert reports["b"].progress.is_complete and reports["b"].progress.assigned == {}


@ALGORITHMS
def test_round_in_which_all_updates_were_refused_counts_its_steps(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b")
    reports = run.round(a=noise(1) * float("nan"), b=noise(2) * float("inf"))
    assert (reports["a"].progress.inner_step, reports["a"].progress.tokens) == (1, 0)
    assert run["a"].inner.step_count == run["b"].inner.step_count == 1


@STEP_ALGORITHMS
def test_round_of_joiners_alone_moves_nothing(start_run: StartRun, noise: Noise, algorithm: Algorithm) -> None:
    run = start_run(algorithm, "a")
    run.round(a=noise(1))
    run.add("b").receive(run["a"])
    run["a"].member.close()  # lost, before it handed on anything new
    before = run["b"].outer.progress
    report = run.together(b=run["b"].join)["b"]
    assert (report.members, report.weights, report.samples) == (("b",), (0,), (0,))
    assert (report.progress.inner_step, report.progress.tokens) == (before.inner_step, before.tokens)
    assert report.state_digest == run["a"].outer.state_digest
    assert report.progress.assigned == {"b": before.assigned["a"]}
    assert run.round(b=noise(2))["b"].progress.inner_step == before.inner_step + 1


@ALGORITHMS
@pytest.mark.parametrize("replays", [False, True], ids=["fetched", "replayed"])
def test_nodes_that_come_after_a_round_of_joiners_alone_stay(
    start_run: StartRun, noise: Noise, algorithm: Algorithm, replays: bool
) -> None:
    """A step more or less at the learning rate's schedule would give them another state."""
    run = start_run(algorithm, "a", total_steps=20)
    run.round(a=noise(1))
    run.add("b").receive(run["a"])
    run.add("c").receive(run["a"])
    run["a"].member.close()
    run.together(b=run["b"].join)
    run.round(b=noise(2))
    if not replays:
        run["c"].receive(run["b"])
    reports = run.round_with_joiner("c", b=noise(3))
    for seed in (4, 6):
        assert {name: report.state_digest for name, report in reports.items()} == dict.fromkeys(
            "bc", run["b"].outer.state_digest
        )
        assert [run[name].inner.step_count for name in "bc"] == [run["b"].outer.progress.inner_step] * 2
        reports = run.round(b=noise(seed), c=noise(seed + 1))


# -- leaving --------------------------------------------------------------------------------------------------------


@ALGORITHMS
def test_node_that_leaves_hands_over_what_it_learned_and_is_dealt_nothing(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b")
    run["b"].departure.ask(0.0)
    reports = run.round(a=noise(1), b=noise(2))
    report = reports["b"]
    assert [run.store.view(1).ready[name].steps_requested for name in ("a", "b")] == [1, 0]
    assert [reports[name].leaving for name in ("a", "b")] == [("b",), ("b",)]
    assert report.weights == (10, 10) and not report.progress.is_complete
    assert report.progress.assigned.keys() == {"a"} and report.progress.ledgers[SHARED].returned == ()
    run["b"].member.close()
    assert run.round(a=noise(3))["a"].members == ("a",)


def test_node_that_leaves_in_the_middle_of_a_round_gives_the_rest_of_its_samples_back(
    start_run: StartRun, noise: Noise
) -> None:
    run = start_run(diloco(inner_steps=3), "a", "b")
    run["b"].departure.ask(0.0)
    reports = run.together(
        a=lambda: run["a"].take_steps(sequence(noise, 0, 3), 10), b=lambda: run["b"].take_step(noise(9), 10)
    )
    assert (reports["a"].weights, reports["a"].samples) == ((30, 10), (12, 4))
    assert reports["a"].progress.assigned == {"a": ((16, 28),)}  # 16..24 were b's


def test_node_that_leaves_with_all_others_ends_no_run(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(), "a", "b")
    for name in ("a", "b"):
        run[name].departure.ask(0.0)
    progress = run.round(a=noise(1), b=noise(2))["a"].progress
    assert progress.assigned == {} and not progress.is_complete


# -- fault points ---------------------------------------------------------------------------------------------------

TRANSFER = ["opened", "transfer50", "transfer99", "reduced", "voted", "committed", "applied"]


@ALGORITHMS
@pytest.mark.parametrize(
    ("role", "points"),
    [
        ("member", ["ready", "waiting", *TRANSFER]),
        ("leaver", ["ready", "leaving", *TRANSFER]),
        ("joiner", ["ready", "waiting", *TRANSFER]),
    ],
)
def test_fault_points_are_passed_in_the_order_of_a_nodes_life(
    start_run: StartRun,
    noise: Noise,
    monkeypatch: pytest.MonkeyPatch,
    algorithm: Algorithm,
    role: str,
    points: list[str],
) -> None:
    run, passed = start_run(algorithm, *("a" if role == "joiner" else "ab")), []
    if role == "joiner" and not trains_first(algorithm):
        points = TRANSFER
    if role == "joiner":
        run.add("b").receive(run["a"])
    if role == "leaver":
        run["b"].departure.ask(0.0)
    monkeypatch.setattr(run["b"].faults, "at", lambda point, round: passed.append((point, round)))
    if role == "joiner":
        run.round_with_joiner("b", a=noise(1))
    else:
        run.round(a=noise(1), b=noise(2))
    assert passed == [(point, 0 if point == "leaving" else 1) for point in points]


# -- joining --------------------------------------------------------------------------------------------------------


@ALGORITHMS
@pytest.mark.parametrize("missed", [1, 3])
@pytest.mark.defect(7)
def test_joiner_that_misses_rounds_while_joining_catches_up_and_joins_the_next(
    start_run: StartRun, noise: Noise, algorithm: Algorithm, missed: int
) -> None:
    run = start_run(algorithm, "a")
    run.round(a=noise(1))
    run.add("b").receive(run["a"])
    for seed in range(missed):
        run.round(a=noise(10 + seed))
    reports = run.round_with_joiner("b", a=noise(2))
    assert reports["b"].round == 2 + missed
    assert (reports["b"].members, reports["b"].weights) == (("a", "b"), (10, 10 * trains_first(algorithm)))
    assert reports["a"].state_digest == reports["b"].state_digest
    reports = run.round(a=noise(3), b=noise(4))
    assert reports["a"].state_digest == reports["b"].state_digest and reports["a"].weights == (10, 10)
    assert torch.equal(run["a"].params, run["b"].params)
    assert run["a"].inner.step_count == run["b"].inner.step_count


@STEP_ALGORITHMS
def test_joiner_whose_round_was_committed_without_it_tries_the_next(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a")
    joiner = run.add("b")
    joiner.receive(run["a"])
    vote = joiner.member.vote

    def vote_too_late(plan: Any, digest: str, record: Any) -> None:
        joiner.member.vote = vote
        run.store.expire_lease("b")  # between the transfer and the vote
        run.store.await_committed(1)
        run.store.renew_lease("b", Peer("b", "host", 1, False), first=True)
        vote(plan, digest, record)

    def make_rounds() -> Any:
        run.store.await_ready(1, "b")
        run["a"].take_step(noise(1), 10)
        run.store.await_ready(2, "b")
        return run["a"].take_step(noise(2), 10)

    joiner.member.vote = vote_too_late
    reports = run.together(a=make_rounds, b=joiner.join)
    assert [v.members for v in run.store.verdicts] == [("a",), ("a",), ("a", "b")]
    assert reports["b"].round == 2 and reports["a"].state_digest == reports["b"].state_digest


def test_joiner_whose_missed_rounds_nobody_keeps_has_to_fetch_the_state_again(
    start_run: StartRun, noise: Noise
) -> None:
    run = start_run(diloco(), "a", journal_rounds=1)
    run.add("b").receive(run["a"])
    run.round(a=noise(1))
    run.round(a=noise(2))
    run.settle_journals()
    with pytest.raises(RecoveryFailed, match="round 1"):
        run["b"].join()
    run["b"].receive(run["a"])
    reports = run.round_with_joiner("b", a=noise(3))
    assert reports["a"].state_digest == reports["b"].state_digest


@ALGORITHMS
def test_joiner_that_comes_when_the_run_ends_is_told_that_it_is_over(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", total_steps=2)
    run.round(a=noise(1))
    run.add("b").receive(run["a"])
    run.round(a=noise(2))
    with pytest.raises(RunOver, match="round 2"):
        run["b"].join()
    assert run["b"].outer.state_digest == run["a"].outer.state_digest


def test_node_that_comes_back_after_a_fence_brings_no_steps_of_its_old_life(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=3), "a", "b")
    run["b"].member.close()  # its lease ran out
    run.round(a=noise(1))
    outcome = run.together(b=lambda: run["b"].take_steps(sequence(noise, 10, 3), 10))["b"]
    assert isinstance(outcome, Fenced)
    run.replace_member("b")
    run["b"].receive(run["a"])
    reports = run.round_with_joiner("b", a=noise(2))
    assert reports["a"].members == ("a", "b-again")
    assert (reports["a"].weights, reports["a"].samples) == ((10, 10), (4, 4))
    assert reports["a"].progress.inner_step == 2
