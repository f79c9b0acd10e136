"""DeMo and SparseLoCo as runs of several nodes: as their oracles say, and what nodes that fail do to the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
from tests.oracles.problem import LAYOUT, SHAPES, Problem
from tests.oracles.sparse import demo, sparseloco
from tests.unit.conftest import FakeNode, FakeRun, ModelOf
from tests.unit.outer.test_oracles import runs_of
from torch import Tensor

from zeroband.config.optim import AdamWConfig, LinearSchedule, OptimConfig
from zeroband.config.outer import ClipConfig, DemoConfig, SparseLocoConfig
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.membership.topology import LinkTable
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import Fenced, RecoveryFailed
from zeroband.outer.aggregator import aggregator_of
from zeroband.outer.sparseloco import error_rule
from zeroband.state.digest import digest_of

StartRun = Callable[..., FakeRun]
Noise = Callable[..., Tensor]
LR, ROUNDS, INNER_STEPS = 0.01, 14, 4
CONSTANT = OptimConfig(
    adamw=AdamWConfig(lr=LR, weight_decay=0.0),
    schedule=LinearSchedule(type="linear", final_ratio=1.0),
    warmup_steps=0,
    clip_norm=None,
)
"""What the oracles take."""

DEMO = DemoConfig(type="demo")
SPARSELOCO = SparseLocoConfig(type="sparseloco", inner_steps=1)
EACH = pytest.mark.parametrize("algorithm", [DEMO, SPARSELOCO], ids=["demo", "sparseloco"])


def memory_of(node: FakeNode) -> Tensor:
    (name,) = node.outer.local_sections
    return node.buffers[name]


# -- oracles --------------------------------------------------------------------------------------------------------


def train_demo(run: FakeRun, problem: Problem, name: str) -> list[Tensor]:
    node, history = run[name], list[Tensor]()
    for step in range(1, ROUNDS + 1):
        report = node.ddp_step(problem.gradient("abcd".index(name), step, node.params), 10)
        assert report is not None and digest_of(node.params) == report.state_digest
        history.append(node.params)
    return history


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_demo_of_four_nodes_of_which_one_drops_is_its_oracle_bit_for_bit(start_run: StartRun, share: float) -> None:
    problem = Problem(4)
    config = DemoConfig(type="demo", k=5, chunk=13, values="float32", decay=0.99, share=share)
    run = start_problem(start_run, problem, config, faults={"c": ["opened@11=SIGKILL"]})
    done = run.together(**{name: partial(train_demo, run, problem, name) for name in "abcd"})
    theirs = demo(problem, ROUNDS, chunk=13, k=5, lr=LR, decay=0.99, share=share, leaves={2: 11})
    for name in "abd":
        assert all(torch.equal(a, b) for a, b in zip(done[name], theirs, strict=True))


def train_sparseloco(
    run: FakeRun, problem: Problem, name: str, *, tokens: int = 10, rounds: int = ROUNDS
) -> list[Tensor]:
    node, history = run[name], list[Tensor]()
    for round in range(rounds):
        first = 1 + round * INNER_STEPS
        node.set_params(problem.inner_steps("abcd".index(name), first, INNER_STEPS, node.params))
        node.outer.learned(tokens, 0.0)
        (report,) = node.outer.sync_parameters(first, ends_round=True)
        assert digest_of(node.params) == report.state_digest
        history.append(node.params)
    return history


DIVISORS = pytest.mark.parametrize("divisor", ["senders", "members"])
Divisor = Literal["senders", "members"]


def small_sparseloco(divisor: Divisor) -> SparseLocoConfig:
    return SparseLocoConfig(type="sparseloco", inner_steps=INNER_STEPS, k=5, chunk=4, lr=0.8, divisor=divisor)


@pytest.mark.slow
@DIVISORS
def test_sparseloco_of_two_nodes_of_which_one_drops_is_its_oracle_bit_for_bit(
    start_run: StartRun, divisor: Divisor
) -> None:
    problem, config = Problem(2), small_sparseloco(divisor)
    run = start_problem(start_run, problem, config, faults={"b": ["opened@11=SIGKILL"]})
    done = run.together(**{name: partial(train_sparseloco, run, problem, name) for name in "ab"})
    runs = runs_of(error_rule(config, LAYOUT).codec)
    theirs = sparseloco(problem, ROUNDS, INNER_STEPS, runs=runs, decay=0.95, lr=0.8, leaves={1: 10}, divisor=divisor)
    assert all(torch.equal(a, b) for a, b in zip(done["a"], theirs, strict=True))


@pytest.mark.slow
@DIVISORS
def test_sparseloco_of_unequal_weights_is_its_oracle(start_run: StartRun, divisor: Divisor) -> None:
    """By as much as float32 rounds thirds."""
    problem, config, weights = Problem(3), small_sparseloco(divisor), (10, 20, 70)
    run = start_problem(start_run, problem, config, faults={})
    works = {
        n: partial(train_sparseloco, run, problem, n, tokens=tokens, rounds=3)
        for n, tokens in zip("abc", weights, strict=True)
    }
    done = run.together(**works)
    runs = runs_of(error_rule(config, LAYOUT).codec)
    theirs = sparseloco(problem, 3, INNER_STEPS, runs=runs, decay=0.95, lr=0.8, divisor=divisor, weights=weights)
    for ours, expected in zip(done["a"], theirs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def start_problem(
    start_run: StartRun, problem: Problem, config: Any, *, faults: dict[str, list[str]], total_steps: int = 10_000
) -> FakeRun:
    """A run of the problem's nodes, at the problem's start."""

    def make_model() -> ModelOf:
        model, start = ModelOf(SHAPES), problem.start()
        for (_, parameter), slot in zip(sorted(model.named_parameters()), LAYOUT.slots, strict=True):
            parameter.data.copy_(start[slot.start : slot.start + slot.numel].view(slot.shape))
        return model

    names = "abcd"[: problem.nodes]
    return start_run(config, *names, inject=faults, optim=CONSTANT, model=make_model, total_steps=total_steps)


# -- members --------------------------------------------------------------------------------------------------------


@EACH
def test_nodes_hold_one_state_and_memories_of_their_own(
    start_run: StartRun, noise: Noise, algorithm: DemoConfig | SparseLocoConfig
) -> None:
    run = start_run(algorithm, "a", "b")
    for seed in range(3):
        reports = run.round(a=noise(2 * seed), b=noise(2 * seed + 1))
        assert reports["a"].state_digest == reports["b"].state_digest == digest_of(run["a"].params)
    assert torch.equal(run["a"].params, run["b"].params)
    assert not torch.equal(memory_of(run["a"]), memory_of(run["b"]))


@EACH
def test_joiner_begins_with_an_empty_memory_and_learns_with_the_others(
    start_run: StartRun, noise: Noise, algorithm: DemoConfig | SparseLocoConfig
) -> None:
    run = start_run(algorithm, "a")
    run.round(a=noise(1))
    assert memory_of(run["a"]).any()
    run.add("b").receive(run["a"])
    reports = run.round_with_joiner("b", a=noise(2))
    assert reports["a"].state_digest == reports["b"].state_digest and not memory_of(run["b"]).any()
    reports = run.round(a=noise(3), b=noise(4))
    assert reports["a"].weights == (10, 10) and reports["a"].state_digest == reports["b"].state_digest
    assert memory_of(run["b"]).any()


@EACH
@pytest.mark.parametrize("point", ["opened", "reduced"])
def test_retry_sends_the_same_payload_and_takes_it_out_once(
    start_run: StartRun, noise: Noise, algorithm: DemoConfig | SparseLocoConfig, point: str
) -> None:
    run = start_run(algorithm, "a", "b", "c", inject={"c": [f"{point}@1=SIGKILL"]})
    reports = run.round(a=noise(1), b=noise(2), c=noise(3))
    assert reports["a"].retries == 1 and reports["a"].members == ("a", "b")
    alone = start_again(run, algorithm, "a", "b")
    expected = alone.round(a=noise(1), b=noise(2))
    for name in ("a", "b"):
        assert reports[name].state_digest == expected[name].state_digest
        assert torch.equal(memory_of(run[name]), memory_of(alone[name]))


@EACH
def test_payload_of_a_node_that_is_voted_out_goes_back_into_its_memory(
    start_run: StartRun, noise: Noise, algorithm: DemoConfig | SparseLocoConfig
) -> None:
    """Nothing was sent of what it learned: all of it is still there."""
    run = start_run(algorithm, "a", "b")
    run["b"].member.close()  # its lease ran out
    run.round(a=noise(1))
    before = run["b"].params
    assert isinstance(run.together(b=lambda: run["b"].take_step(noise(2), 10))["b"], Fenced)
    learned = 0.1 * noise(2) if algorithm is DEMO else before - (before + noise(2))
    torch.testing.assert_close(memory_of(run["b"]), learned, rtol=0, atol=1e-6)


@EACH
def test_node_that_learned_nothing_finite_sends_nothing_and_keeps_its_memory(
    start_run: StartRun, noise: Noise, algorithm: DemoConfig | SparseLocoConfig
) -> None:
    run = start_run(algorithm, "a", "b")
    run.round(a=noise(1), b=noise(2))
    kept = memory_of(run["b"]).clone()
    reports = run.round(a=noise(3), b=noise(4) * float("nan"))
    assert (reports["b"].weights, reports["b"].is_left_out, reports["b"].payload_bytes) == ((10, 0), True, None)
    assert reports["a"].state_digest == reports["b"].state_digest and torch.equal(run["a"].params, run["b"].params)
    assert torch.equal(memory_of(run["b"]), kept) and run["b"].params.isfinite().all()


def test_node_without_a_finite_gradient_in_its_round_has_no_weight_and_keeps_its_memory(
    start_run: StartRun, noise: Noise
) -> None:
    run = start_run(SPARSELOCO, "a", "b")
    run.round(a=noise(1), b=noise(2))
    kept = memory_of(run["b"]).clone()
    run["b"].loss = float("nan")
    reports: Any = run.together(
        a=lambda: run["a"].take_step(noise(3), 10), b=lambda: run["b"].take_step(0 * noise(4), 0)
    )
    assert (reports["b"].weights, reports["b"].is_left_out) == ((10, 0), False)
    torch.testing.assert_close(memory_of(run["b"]), 0.95 * kept, rtol=0, atol=1e-6)


@EACH
def test_what_is_no_payload_is_left_out_by_all_and_named(
    start_run: StartRun, noise: Noise, algorithm: DemoConfig | SparseLocoConfig
) -> None:
    run = start_run(algorithm, "a", "b", "c")
    run["b"].lanes.forge[0] = lambda payload: payload[32:].fill_(0xFF)
    reports = run.round(a=noise(1), b=noise(2), c=noise(3))
    assert {name for report in reports.values() for name, _ in report.refused} == {"b"}
    assert len({report.state_digest for report in reports.values()}) == 1
    without = start_again(run, algorithm, "a", "c").round(a=noise(1), c=noise(3))
    assert reports["a"].state_digest == without["a"].state_digest
    assert run.round(a=noise(4), b=noise(5), c=noise(6))["a"].refused == ()


def start_again(run: FakeRun, algorithm: Any, *names: str) -> FakeRun:
    """A run of these nodes from the same start."""
    again = FakeRun(algorithm, run.folder / "again", run.local, founders=len(names), optim=run.optim)
    again.folder.mkdir()
    for name in names:
        again.add(name)
    again.together(**{name: again[name].outer.found for name in names})
    return again


def test_payload_with_which_the_sum_is_not_finite_is_left_out(start_run: StartRun, noise: Noise) -> None:
    """Two of these are as much as float32 holds."""
    run = start_run(DemoConfig(type="demo", values="float32"), "a", "b", "c")
    for node in run.nodes.values():
        memory_of(node)[0] = 3e38
    reports: dict[str, RoundReport] = run.round(a=noise(1), b=noise(2), c=noise(3))
    (refused,) = {report.refused for report in reports.values()}
    assert len(refused) == 1 and "larger than float32 holds" in refused[0][1]
    assert len({report.state_digest for report in reports.values()}) == 1
    assert all(node.params.isfinite().all() for node in run.nodes.values())


def test_payload_is_counted_once(start_run: StartRun, noise: Noise) -> None:
    run = start_run(DEMO, "a", "b", "c")
    report = run.round(a=noise(1), b=noise(2), c=noise(3))["a"]
    assert report.payload_bytes is not None and report.sent_bytes == report.received_bytes == 2 * report.payload_bytes
    assert start_again(run, DEMO, "a").round(a=noise(1))["a"].payload_bytes is None


def test_contribution_that_is_longer_than_the_median_is_scaled_down(start_run: StartRun, noise: Noise) -> None:
    robust = ClipConfig(type="clip")
    config = SparseLocoConfig(type="sparseloco", inner_steps=1, k=4096, values="float32", robust=robust)
    run = start_run(config, "a", "b", "c")
    before, updates = run["a"].params, {"a": noise(1), "b": noise(2), "c": 100 * noise(3)}
    reports = run.round(**updates)
    sent = [before - (before + update) for update in updates.values()]
    for chunk in (slice(0, 7), slice(7, 22)):  # the bias, and the matrix
        deltas = [delta[chunk] for delta in sent]
        median = sorted(float(delta.norm()) for delta in deltas)[1]
        mean = torch.stack([delta * min(1.0, median / float(delta.norm())) for delta in deltas]).mean(dim=0)
        torch.testing.assert_close(run["a"].params[chunk], before[chunk] - mean, rtol=0, atol=1e-5)
    assert {report.trust for report in reports.values()} == {1.0}


@pytest.mark.parametrize("values", ["two_bit", "float32"])
def test_payload_against_the_others_counts_nothing_in_the_end(
    start_run: StartRun, noise: Noise, values: Literal["two_bit", "float32"]
) -> None:
    robust = ClipConfig(type="clip")
    config = SparseLocoConfig(type="sparseloco", inner_steps=1, k=4096, values=values, robust=robust)
    run, learned = start_run(config, "a", "b", "c", "d"), noise(1, 1e-2)
    for _ in range(7):
        reports = run.round(a=learned, b=1.1 * learned, c=0.9 * learned, d=-100 * learned)
        assert len({report.state_digest for report in reports.values()}) == 1
    assert [reports[name].trust for name in "abcd"] == [1.0, 1.0, 1.0, 0.0]
    before = run["a"].params
    run.round(a=learned, b=learned, c=learned, d=-100 * learned)
    assert float((run["a"].params - before) @ learned) > 0


def test_late_node_replays_clipped_rounds_to_the_same_bits(start_run: StartRun, noise: Noise) -> None:
    robust = ClipConfig(type="clip")
    config = SparseLocoConfig(type="sparseloco", inner_steps=2, k=4, values="float32", robust=robust)
    run = start_run(config, "a", "b", "c", "d", quorum=0.75)
    with run.hurry():
        run.round(a=noise(1), b=50 * noise(2), c=noise(7))
    reports = run.round_with_late("d", [noise(3), noise(4)], a=noise(5), b=noise(6), c=noise(8))
    assert reports["d"].weights[-1] > 0 and len({report.state_digest for report in reports.values()}) == 1


def test_signs_of_demo_count_by_trust(start_run: StartRun, noise: Noise) -> None:
    run, learned = start_run(DemoConfig(type="demo", robust=ClipConfig(type="clip")), "a", "b", "c", "d"), noise(1)
    for _ in range(6):
        reports = run.round(a=learned, b=learned, c=learned, d=-learned)
    assert [reports[name].trust for name in "abcd"] == [1.0, 1.0, 1.0, 0.0]


def test_late_node_sends_what_it_learned_in_a_later_round(start_run: StartRun, noise: Noise) -> None:
    config = SparseLocoConfig(type="sparseloco", inner_steps=2, k=4096, values="float32", lr=0.5)
    run = start_run(config, "a", "b", "c")
    before = run["c"].params
    with run.hurry():
        run.round(a=noise(1), b=noise(2))
    middle = run["a"].params
    learned = before - (before + noise(3) + noise(4))
    reports = run.round_with_late("c", [noise(3), noise(4)], a=noise(5), b=noise(6))
    assert reports["c"].weights == (10, 10, 20)
    ours = {name: middle - (middle + noise(seed)) for name, seed in (("a", 5), ("b", 6))}
    mean = sum(ours.values(), torch.zeros(22)) * 0.25 + learned * 0.5
    torch.testing.assert_close(run["b"].params, middle - 0.5 * mean, rtol=0, atol=1e-6)
    assert len({report.state_digest for report in reports.values()}) == 1


# -- the aggregator -------------------------------------------------------------------------------------------------

AGGREGATED = DemoConfig(type="demo", aggregator=True)


@pytest.mark.parametrize("values", ["sign", "float32"])
def test_aggregator_gives_everybody_the_bits_of_all_payloads(
    start_run: StartRun, noise: Noise, values: Literal["sign", "float32"]
) -> None:
    run = start_run(DemoConfig(type="demo", aggregator=True, values=values), "a", "b", "c")
    plain = start_again(run, DemoConfig(type="demo", values=values), "a", "b", "c")
    for seed in range(0, 9, 3):
        updates = {name: noise(seed + i) for i, name in enumerate("abc")}
        reports, expected = run.round(**updates), plain.round(**updates)
        assert {report.state_digest for report in reports.values()} == {expected["a"].state_digest}
    payload = expected["b"].payload_bytes
    assert [reports[name].payload_bytes for name in "abc"] == [None, payload, payload]
    assert [reports[name].sent_bytes for name in "bc"] == [payload, payload]
    assert reports["a"].sent_bytes == reports["b"].received_bytes + reports["c"].received_bytes


def test_round_that_loses_its_aggregator_has_another_one(start_run: StartRun, noise: Noise) -> None:
    run = start_run(AGGREGATED, "a", "b", "c", inject={"a": ["opened@1=SIGKILL"]})
    reports = run.round(a=noise(1), b=noise(2), c=noise(3))
    assert reports["b"].members == ("b", "c") and reports["b"].retries == 1
    without = start_again(run, DEMO, "b", "c").round(b=noise(2), c=noise(3))
    assert {report.state_digest for report in reports.values()} == {without["b"].state_digest}
    assert reports["b"].payload_bytes is None and reports["c"].payload_bytes is not None


def test_payload_that_the_aggregator_finds_bad_is_left_out_for_all(start_run: StartRun, noise: Noise) -> None:
    run = start_run(AGGREGATED, "a", "b", "c")
    run["b"].lanes.forge[0] = lambda payload: payload[32:].fill_(0xFF)
    reports = run.round(a=noise(1), b=noise(2), c=noise(3))
    without = start_again(run, DEMO, "a", "c").round(a=noise(1), c=noise(3))
    assert {report.state_digest for report in reports.values()} == {without["a"].state_digest}
    assert [member for member, _ in reports["a"].refused] == ["b"]


@pytest.mark.parametrize("number", [1, 2], ids=["a wrong length", "no payload"])
def test_round_moves_nothing_where_the_aggregator_sends_nonsense(
    start_run: StartRun, noise: Noise, number: int
) -> None:
    run = start_run(AGGREGATED, "a", "b", optim=CONSTANT)
    run["a"].lanes.forge[number] = lambda content: content[:8].fill_(0x7F)
    before = run["a"].params
    reports = run.round(a=noise(1), b=noise(2))
    assert reports["a"].state_digest == reports["b"].state_digest == digest_of(before)
    assert run.round(a=noise(1), b=noise(2))["a"].state_digest != digest_of(before)


def test_aggregator_is_the_member_with_the_fastest_link_and_the_next_one_after_a_dispute() -> None:
    plan = RoundPlan(1, 1, 1, ("a", "b", "c"), (1, 1, 1), network=LinkTable(rates=(5, 20, 20)))
    assert [aggregator_of(replace(plan, retries=n)) for n in range(4)] == ["b", "c", "a", "b"]
    assert aggregator_of(replace(plan, network=LinkTable())) == "a"


# -- the journal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [DEMO, SPARSELOCO, AGGREGATED], ids=["demo", "sparseloco", "aggregated"])
def test_journal_keeps_what_was_sent_and_replays_it_bit_for_bit(
    start_run: StartRun, noise: Noise, algorithm: DemoConfig | SparseLocoConfig
) -> None:
    """Whoever sent something bad, or nothing at all."""
    run = start_run(algorithm, "a", "b", "c")
    joiner = run.add("d")
    joiner.receive(run["a"])
    run["b"].lanes.forge[0] = lambda payload: payload[32:].fill_(0xFF)
    for round, nobody in [(1, False), (2, False), (3, True)]:
        updates = {name: noise(10 * round + i) * (float("nan") if nobody else 1) for i, name in enumerate("abc")}
        run.round(**updates)
        entries = [run[name].entry(round) for name in "abc"]
        assert entries[0] is not None
        assert all(entry is not None and torch.equal(entry.update, entries[0].update) for entry in entries)
        assert run.catch_up("d") == run["a"].outer.state_digest
    assert torch.equal(joiner.params, run["c"].params)


@pytest.mark.parametrize("algorithm", [DEMO, AGGREGATED], ids=["demo", "aggregated"])
@pytest.mark.parametrize("damage", [lambda u: u[:-1], lambda u: u[:5], lambda u: torch.cat([u, u]), lambda u: u ^ 0xFF])
def test_entry_that_is_no_round_of_payloads_is_refused(
    start_run: StartRun, noise: Noise, algorithm: DemoConfig, damage: Callable[[Tensor], Tensor]
) -> None:
    run = start_run(algorithm, "a", "b")
    joiner = run.add("c")
    joiner.receive(run["a"])
    run.round(a=noise(1), b=noise(2))
    run.damage = damage
    with pytest.raises(RecoveryFailed, match="no round of payloads"):
        joiner.join()
