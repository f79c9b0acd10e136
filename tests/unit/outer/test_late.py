"""StragglerTimer: the others open a round without a node that lives; it catches up, and what it learned comes later."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracles.problem import LAYOUT, ProblemModel
from tests.unit.audits import audit_of
from tests.unit.outer.background import DEADLINE_S, ROUND, await_end
from tests.unit.outer.test_overlap import assert_one_outer_state, go_on
from torch import Tensor

from zeroband.config.outer import DilocoConfig, OuterSGDConfig, SparseLocoConfig
from zeroband.elastic.membership.progress import MAX_LATE_PHASES
from zeroband.elastic.membership.records import View
from zeroband.elastic.rounds.background import BoundaryWatch
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import Fenced, RunOver
from zeroband.outer import many_steps
from zeroband.outer.diloco import MOMENTUM, PARAMS
from zeroband.state.digest import digest_of
from zeroband.state.fragments import fragments_of

BATCH = 4
StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]


class Nesterov:
    """DiLoCo's outer step written out: a node sends the way back to the parameters that it started from."""

    config = OuterSGDConfig(lr=0.7, momentum=0.9)

    def __init__(self, theta: Tensor) -> None:
        self.theta, self.velocity = theta, torch.zeros_like(theta)

    def sent(self, start: Tensor, inner: Tensor) -> Tensor:
        return start - inner

    def sent_late(self, starts: list[Tensor], inner: Tensor) -> Tensor:
        return starts[0] - inner

    def step(self, mean: Tensor) -> None:
        self.velocity = self.velocity * 0.9 + mean
        self.theta = self.theta - (self.velocity * 0.9 + mean) * 0.7


class Average(Nesterov):
    """The mean of parameters: those of a late node move along with the outer parameters."""

    config = OuterSGDConfig(lr=1.0, momentum=0.0, nesterov=False)

    def sent(self, start: Tensor, inner: Tensor) -> Tensor:
        return inner

    def sent_late(self, starts: list[Tensor], inner: Tensor) -> Tensor:
        for before, after in itertools.pairwise(starts):
            inner = inner - before + after
        return inner

    def step(self, mean: Tensor) -> None:
        self.theta = mean


WEIGHTS = {"a": 10, "b": 10, "c": 20}
REFERENCES = pytest.mark.parametrize("reference", [Nesterov, Average])


def diloco(inner_steps: int = 2, optimizer: OuterSGDConfig = Nesterov.config) -> DilocoConfig:
    return DilocoConfig(type="diloco", inner_steps=inner_steps, optimizer=optimizer)


def weighted(sent: dict[str, Tensor], weights: dict[str, int]) -> Tensor:
    """The mean as the lanes of these tests make it: shares first, then the sum in the order of the members."""
    total = sum(weights[name] for name in sent)
    return sum((sent[name] * (weights[name] / total) for name in sorted(sent)), torch.zeros(22))


def start_without_c(start_run: StartRun, noise: Noise, config: DilocoConfig, missed: int, **more: Any) -> Any:
    """A run of a, b and c whose first rounds c misses."""
    run = start_run(config, "a", "b", "c", **more)
    for round in range(1, missed + 1):
        with run.hurry() if round == 1 else nullcontext():
            reports = run.round(a=noise(10 * round), b=noise(10 * round + 1))
        assert (reports["a"].members, reports["a"].late) == (("a", "b"), ("c",))
    return run


@REFERENCES
@pytest.mark.parametrize("missed", [1, 2])
def test_late_node_catches_up_and_contributes_what_it_learned_from_its_old_start(
    start_run: StartRun, noise: Noise, reference: type[Nesterov], missed: int
) -> None:
    run = start_without_c(start_run, noise, diloco(optimizer=reference.config), missed)
    expected, learned = reference(run["c"].params), [noise(90), noise(91)]
    inner_of_c = expected.theta + learned[0] + learned[1]
    starts = [expected.theta]
    for round in range(1, missed + 1):
        updates = {"a": noise(10 * round), "b": noise(10 * round + 1)}
        sent = {name: expected.sent(expected.theta, expected.theta + update) for name, update in updates.items()}
        expected.step(weighted(sent, {"a": 10, "b": 10}))
        starts.append(expected.theta)
    updates = {"a": noise(3), "b": noise(4)}
    reports = run.round_with_late("c", learned, **updates)
    sent = {name: expected.sent(expected.theta, expected.theta + update) for name, update in updates.items()}
    sent["c"] = expected.sent_late(starts, inner_of_c)
    expected.step(weighted(sent, {"a": 10, "b": 10, "c": 20}))
    for name, report in reports.items():
        assert (report.round, report.weights, report.samples) == (missed + 1, (10, 10, 20), (4, 4, 8))
        assert report.state_digest == digest_of(expected.theta, expected.velocity)
        assert torch.equal(run[name].params, expected.theta)
    assert not torch.equal(expected.theta, starts[-1])


def test_late_node_trains_on_while_what_it_learned_waits_for_the_next_round(start_run: StartRun, noise: Noise) -> None:
    """It begins anew with the outer parameters; what it learns then counts in the round after, relative to them."""
    run = start_without_c(start_run, noise, diloco(), missed=1)
    c, expected = run["c"], Nesterov(run["c"].params)
    start = expected.theta
    expected.step(weighted({"a": start - (start + noise(10)), "b": start - (start + noise(11))}, {"a": 10, "b": 10}))
    learned = start - (start + noise(90) + noise(91))
    assert c.diloco_step(noise(90), 10) is None
    assert c.diloco_step(noise(91), 10, ends_round=True) is None, "it stands still"
    assert torch.equal(c.params, expected.theta)
    assert c.diloco_step(noise(92), 10, ends_round=False) is None, "it stands still"
    start_of_c = expected.theta

    reports = run.round(a=noise(3), b=noise(4))
    sent = {name: expected.theta - (expected.theta + noise(seed)) for name, seed in (("a", 3), ("b", 4))}
    expected.step(weighted({**sent, "c": learned}, {"a": 10, "b": 10, "c": 20}))
    assert (reports["a"].weights, reports["a"].samples) == ((10, 10, 20), (4, 4, 8))
    assert reports["a"].state_digest == digest_of(expected.theta, expected.velocity)

    reports = run.together(
        a=lambda: run["a"].take_step(noise(5), 10),
        b=lambda: run["b"].take_step(noise(6), 10),
        c=lambda: c.diloco_step(noise(93), 10, ends_round=True),
    )
    sent = {name: expected.theta - (expected.theta + noise(seed)) for name, seed in (("a", 5), ("b", 6))}
    sent["c"] = start_of_c - (start_of_c + noise(92) + noise(93))
    expected.step(weighted(sent, {"a": 10, "b": 10, "c": 20}))
    assert {(r.round, r.weights, r.samples) for r in reports.values()} == {(3, (10, 10, 20), (4, 4, 8))}
    assert len({report.state_digest for report in reports.values()}) == 1
    torch.testing.assert_close(c.params, expected.theta, rtol=0, atol=1e-5)
    assert [report.round for report in c.reports] == [2, 3]
    assert audit_of(run).trained == BATCH * (3 + 3 + 4) and audit_of(run).is_exact


def test_phase_ends_once_a_round_was_committed_without_this_node(start_run: StartRun, noise: Noise) -> None:
    """So what it learned is measured from parameters of one round before, not of its whole phase."""
    run = start_run(diloco(inner_steps=9), "a", "b", "c")
    c = run["c"]
    assert c.diloco_step(noise(90), 10, ends_round=False) is None
    c.member.look_after_record()
    assert not c.outer.is_time_over(1)
    with run.hurry():
        run.round(a=noise(10), b=noise(11))
    c.member.look_after_record()  # as its watcher does now and then
    assert c.outer.is_time_over(1)
    assert c.diloco_step(noise(91), 10, ends_round=True) is None
    assert c.outer.round == 1 and not c.outer.is_time_over(0)
    assert run.round(a=noise(3), b=noise(4))["a"].weights == (10, 10, 20)


def test_late_node_is_in_step_with_the_others_again_two_rounds_later(
    start_run: StartRun, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It applies the round that counts it at once, and ends its next phase when the others stand at the boundary."""
    monkeypatch.setattr(many_steps, "BoundaryWatch", partial(BoundaryWatch, look_s=0.002))
    run = start_without_c(start_run, noise, diloco(inner_steps=9), missed=1)
    c, expected = run["c"], Nesterov(run["c"].params)

    def updates(*seeds: int) -> dict[str, Tensor]:
        """What a and b send: the way back from where they trained to."""
        return {name: expected.theta - (expected.theta + noise(seed)) for name, seed in zip("ab", seeds, strict=True)}

    start = expected.theta
    expected.step(weighted(updates(10, 11), {"a": 10, "b": 10}))
    assert c.diloco_step(noise(90), 10, ends_round=True) is None
    learned = {"c": start - (start + noise(90))}
    run.round(a=noise(3), b=noise(4))
    expected.step(weighted({**updates(3, 4), **learned}, {"a": 10, "b": 10, "c": 10}))
    await_end(ROUND)
    assert not c.outer.is_time_over(0), "its round is over, and nobody waits"
    assert c.diloco_step(noise(91), 10, ends_round=False).round == 2
    torch.testing.assert_close(c.params, expected.theta + noise(91), rtol=0, atol=1e-6)
    start_of_c = c.params - noise(91)

    def come_when_called() -> RoundReport | None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not c.outer.is_time_over(1):
            assert time.monotonic() < deadline_s, "it is not called"
        return c.diloco_step(noise(92), 10, ends_round=True)

    reports = run.together(
        a=lambda: run["a"].take_step(noise(5), 10), b=lambda: run["b"].take_step(noise(6), 10), c=come_when_called
    )
    assert {(r.round, r.weights, r.samples, r.late) for r in reports.values()} == {(3, (10, 10, 20), (4, 4, 8), ())}
    expected.step(weighted({**updates(5, 6), "c": start_of_c - (start_of_c + noise(91) + noise(92))}, WEIGHTS))
    assert len({report.state_digest for report in reports.values()}) == 1
    torch.testing.assert_close(run["a"].params, expected.theta, rtol=0, atol=1e-6)
    assert audit_of(run).is_exact


def test_late_node_goes_on_as_a_member_like_the_others(start_run: StartRun, noise: Noise) -> None:
    run = start_without_c(start_run, noise, diloco(), missed=2)
    run.round_with_late("c", [noise(1)], a=noise(2), b=noise(3))
    reports = run.round(a=noise(4), b=noise(5), c=noise(6))
    assert reports["c"].members == ("a", "b", "c") and reports["c"].late == ()
    assert len({report.state_digest for report in reports.values()}) == 1
    assert run["c"].inner.step_count == run["a"].inner.step_count == 4
    assert run["c"].outer.progress == run["a"].outer.progress


def test_samples_of_a_late_node_are_settled_once_and_with_the_round_that_used_them(
    start_run: StartRun, noise: Noise
) -> None:
    run = start_without_c(start_run, noise, diloco(), missed=2)
    assert run["a"].outer.progress.assigned["c"] == (
        (16, 24),
        (32, 40),
        (48, 56),
    )  # with the phases that it may train on
    assert audit_of(run).is_exact
    run.round_with_late("c", [noise(1)], a=noise(2), b=noise(3))
    progress = run["a"].outer.progress
    assert all(start >= 16 for spans in progress.assigned.values() for start, _ in spans)
    assert progress.assigned["c"] == ((20, 24), (32, 40), (48, 56))
    run.round(a=noise(4), b=noise(5), c=noise(6))
    found = audit_of(run)
    assert found.is_exact
    assert found.trained == BATCH * (2 + 2 + 3 + 3)


def test_samples_of_a_late_node_that_dies_go_back(start_run: StartRun, noise: Noise) -> None:
    run = start_without_c(start_run, noise, diloco(), missed=1)
    run["c"].member.close()
    report = run.round(a=noise(2), b=noise(3))["a"]
    assert report.late == () and "c" not in run["a"].outer.progress.assigned
    assert run["a"].outer.progress.assigned["a"][0][0] < 24  # c's 16..24 are among the first to be read again
    run.round(a=noise(4), b=noise(5))
    assert audit_of(run).is_exact


def test_late_node_whose_missed_rounds_nobody_keeps_is_fenced_and_keeps_its_state(
    start_run: StartRun, noise: Noise
) -> None:
    run = start_without_c(start_run, noise, diloco(), missed=2, journal_rounds=1)
    run.settle_journals()
    state = run["c"].outer.state_digest
    outcome = run.together(c=lambda: run["c"].take_steps([noise(1)], 10))["c"]
    assert isinstance(outcome, Fenced)
    assert "late" in str(outcome) and "round 1" in str(outcome)
    assert (run["c"].outer.round, run["c"].outer.state_digest) == (0, state)


def test_late_node_that_catches_up_with_a_journal_of_another_state_is_fenced(start_run: StartRun, noise: Noise) -> None:
    run = start_without_c(start_run, noise, diloco(), missed=1)
    for donor in ("a", "b"):
        run[donor].entry(1).update.view(torch.float32)[3] += 1.0
    outcome = run.together(c=lambda: run["c"].take_steps([noise(1)], 10))["c"]
    assert isinstance(outcome, Fenced) and "has digest" in str(outcome)


def test_last_round_waits_for_a_node_that_was_late_before(start_run: StartRun, noise: Noise) -> None:
    """There is no later round in which what it learned could count."""
    run = start_without_c(start_run, noise, diloco(inner_steps=1), missed=1, total_steps=2)
    with run.hurry():
        reports = run.round_with_late("c", [noise(1)], a=noise(2), b=noise(3))
    assert reports["a"].members == ("a", "b", "c") and reports["a"].progress.is_complete
    assert run["c"].outer.state_digest == run["a"].outer.state_digest
    assert reports["a"].progress.tokens == 10 * (2 + 3)
    assert audit_of(run).is_exact


def test_node_that_the_run_ended_without_is_told_so(start_run: StartRun, noise: Noise) -> None:
    run = start_without_c(start_run, noise, diloco(inner_steps=1), missed=1, total_steps=2)
    run["c"].member.store.expire_lease("c")
    run.round(a=noise(2), b=noise(3))
    assert run["a"].outer.progress.is_complete
    outcome = run.together(c=lambda: run["c"].take_steps([noise(1)], 10))["c"]
    assert isinstance(outcome, Fenced | RunOver)
    assert audit_of(run).is_exact


def test_last_round_waits_for_late_nodes(start_run: StartRun, noise: Noise) -> None:
    run = start_run(diloco(inner_steps=1), "a", "b", "c", total_steps=1)

    def come_late() -> Any:
        run.store.await_ready(1, "a")
        run.store.await_ready(1, "b")
        return run["c"].take_steps([noise(3)], 10)

    with run.hurry():
        reports = run.together(
            a=lambda: run["a"].take_steps([noise(1)], 10), b=lambda: run["b"].take_steps([noise(2)], 10), c=come_late
        )
    assert reports["a"].members == ("a", "b", "c") and reports["a"].progress.is_complete


@REFERENCES
def test_late_update_that_is_not_finite_is_left_out(
    start_run: StartRun, noise: Noise, reference: type[Nesterov]
) -> None:
    run = start_without_c(start_run, noise, diloco(optimizer=reference.config), missed=1)
    reports = run.round_with_late("c", [noise(1) * float("nan")], a=noise(2), b=noise(3))
    assert reports["c"].weights == (10, 10, 0) and reports["c"].is_left_out
    assert len({report.state_digest for report in reports.values()}) == 1
    assert run["c"].params.isfinite().all()
    assert audit_of(run).is_exact


@REFERENCES
def test_round_of_a_late_node_that_loses_a_member_keeps_what_it_learned(
    start_run: StartRun, noise: Noise, reference: type[Nesterov]
) -> None:
    inject = {"b": ["opened@2=SIGKILL"]}
    run = start_without_c(start_run, noise, diloco(optimizer=reference.config), missed=1, inject=inject)
    expected, first = reference(run["a"].params), run["c"].params
    expected.theta, expected.velocity = run["a"].buffers[PARAMS].clone(), run["a"].buffers[MOMENTUM].clone()
    reports = run.round_with_late("c", [noise(5)], a=noise(6), b=noise(7))
    sent = {
        "a": expected.sent(expected.theta, expected.theta + noise(6)),
        "c": expected.sent_late([first, expected.theta], first + noise(5)),
    }
    expected.step(weighted(sent, {"a": 10, "c": 10}))
    for name in ("a", "c"):
        assert (reports[name].members, reports[name].retries) == (("a", "c"), 1)
        assert torch.equal(run[name].params, expected.theta)


# -- where a round is not of the whole, or travels beside training ----------------------------------------------------


def streaming(fragments: int = 1, overlap: int | str = 0, **more: Any) -> DilocoConfig:
    sgd = OuterSGDConfig(lr=0.5, momentum=0.0, nesterov=False)
    settings = {
        "type": "diloco",
        "inner_steps": 4,
        "fragments": fragments,
        "overlap": overlap,
        "optimizer": sgd,
        **more,
    }
    return DilocoConfig.model_validate(settings)


def sparse(**more: Any) -> SparseLocoConfig:
    return SparseLocoConfig.model_validate({"type": "sparseloco", "inner_steps": 4, "k": 5, "chunk": 4, **more})


@pytest.mark.parametrize(
    ("config", "codec"),
    [
        (streaming(), "int8"),
        (streaming(fragments=2), "fp32"),
        (streaming(fragments=2), "int4"),
        (streaming(overlap=2), "int8"),
        (streaming(overlap="full"), "int4"),
        (streaming(overlap="full", merge="mix"), "fp32"),
        (streaming(overlap="full", merge="eager"), "int8"),
        (streaming(overlap=2, merge="eager"), "fp32"),
        (streaming(fragments=2, overlap=1, merge="eager", straggler_grace=0.1), "int8"),
        (streaming(fragments=2, overlap="full", merge="eager", straggler_grace=0.1), "fp32"),
        (streaming(fragments=2, overlap=1), "fp16"),
        (streaming(fragments=2, overlap="full", merge="mix"), "int8"),
        (sparse(), "fp32"),
        (sparse(fragments=2), "fp32"),
        (sparse(fragments=2, overlap="full"), "fp32"),
    ],
    ids=lambda c: c if isinstance(c, str) else f"{c.type}-{c.fragments}-{c.overlap}-{c.merge}",
)
def test_late_node_loses_nothing_and_counts_once(start_run: StartRun, config: Any, codec: str) -> None:
    """It stands still while the others go on for three phases."""
    total = 8 * config.phase_steps
    run = start_run(config, "a", "b", "c", model=ProblemModel, total_steps=total, codec=codec, quorum=0.6)
    with run.hurry():
        go_on(run, 3 * config.phase_steps, "a", "b", nodes=3)
    missed = [verdict.round for verdict in run.store.verdicts if "c" in verdict.plan.late]
    go_on(run, total, nodes=3)
    assert missed, "it was late"
    assert_one_outer_state(run)
    progress = run["a"].outer.progress
    assert progress.is_complete
    trained, beside = sum(node.made_steps for node in run.nodes.values()), config.overlap_steps
    in_vain = trained - progress.tokens // 10  # beside its round, when that turned out to be the last
    assert 0 <= in_vain <= (config.phase_steps if beside is None else beside)
    assert any("c" in verdict.plan.contributors() for verdict in run.store.verdicts)
    assert audit_of(run).is_exact


class Written:
    """Rounds of two fragments: who is not in one keeps what it learned, relative to the outer parameters."""

    def __init__(self, theta: Tensor, ranges: dict[int, Sequence[tuple[int, int]]]) -> None:
        self.theta = theta
        self.ranges = ranges
        self.inner = {name: theta.clone() for name in "abc"}
        self.ahead = {name: [0, 0] for name in "abc"}

    def update(self, name: str, number: int) -> Tensor:
        return 0.1 * torch.randn(len(self.theta), generator=torch.Generator().manual_seed(1000 * ord(name) + number))

    def updates(self, names: str, number: int) -> dict[str, Tensor]:
        """What a phase of these nodes teaches them."""
        for name in names:
            self.inner[name] += self.update(name, number)
            self.ahead[name] = [turns + 1 for turns in self.ahead[name]]
        return {name: self.update(name, number) for name in names}

    def round_of(self, fragment_index: int, members: str) -> None:
        trained = [self.ahead[m][fragment_index] / 2 for m in members]
        divisor = sum(trained) / min(1.0, max(trained)) if len(set(trained)) > 1 else len(members)
        for part in (slice(*span) for span in self.ranges[fragment_index]):
            old = self.theta[part].clone()
            self.theta[part] -= 0.5 * sum(old - self.inner[m][part] for m in members) / divisor
            for name, inner in self.inner.items():
                inner[part] = self.theta[part] if name in members else inner[part] + self.theta[part] - old
        for member in members:
            self.ahead[member][fragment_index] = 0


@pytest.mark.parametrize(
    "config",
    [streaming(fragments=2), sparse(fragments=2, k=16, values="float32", decay=1.0, lr=0.5)],
    ids=["diloco", "sparseloco that sends all"],
)
def test_late_fragment_is_contributed_at_its_next_turn_with_all_that_was_learned(
    start_run: StartRun, config: Any
) -> None:
    run = start_run(config, "a", "b", "c", model=ProblemModel)
    written = Written(
        run["a"].params, {fragment_index: f.ranges for fragment_index, f in enumerate(fragments_of(LAYOUT, 2))}
    )
    for number, fragment_index in ((0, 0), (1, 1)):
        run.round(**written.updates("abc", number))
        written.round_of(fragment_index, "abc")
    with run.hurry():
        run.round(**written.updates("ab", 2))
    written.round_of(0, "ab")
    updates = written.updates("abc", 3)
    run.round_with_late("c", [updates.pop("c")], **updates)
    written.round_of(1, "abc")
    run.round(**written.updates("abc", 4))
    written.round_of(0, "abc")
    torch.testing.assert_close(run["a"].buffers[PARAMS], written.theta, rtol=0, atol=1e-6)
    assert audit_of(run).is_exact


# -- delta: what a late node learned and no round has counted ----------------------------------------------------------

WAYS: dict[str, Any] = {
    "waited for": {},
    "mixed at once": {"merge": "mix"},
    "overwritten": {"overlap": 2},
    "mixed": {"overlap": 2, "merge": "mix"},
    "eager": {"overlap": 2, "merge": "eager"},
    "delayed": {"overlap": "full"},
    "delayed, mixed": {"overlap": "full", "merge": "mix"},
    "delayed, eager": {"overlap": "full", "merge": "eager"},
}


def by(node: Any, updates: Sequence[Tensor]) -> Callable[[int, Tensor], Tensor]:
    """Inner steps that add these, whatever the parameters are."""

    def take(_step: int, inner: Tensor) -> Tensor:
        return inner + updates[node.made_steps]

    return take


def sums(updates: Sequence[Tensor]) -> Tensor:
    return torch.stack([torch.zeros_like(updates[0]), *updates]).double().sum(0)


@pytest.mark.parametrize("lr", [0.5, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_late_node_trains_on_in_every_mode_and_all_that_it_learned_counts(
    start_run: StartRun, noise: Noise, way: str, lr: float
) -> None:
    """In float64: outer steps by the means of what was contributed, and delta is what c learned since its last one.

    a and b learn in the first phase only, so that what they keep of it is all that they bring to the second round.
    """
    sgd = OuterSGDConfig(lr=lr, momentum=0.0, nesterov=False)
    config = streaming(optimizer=sgd, **WAYS[way])
    overlap = config.overlap_steps
    run = start_run(config, "a", "b", "c")
    first, learned = run["a"].params.double(), [noise(100 + step) for step in range(12)]

    def steps(name: str, updates: Sequence[Tensor]) -> None:
        run[name].train(by(run[name], updates), len(updates) - run[name].made_steps)

    def phase(name: str, updates: Sequence[Tensor]) -> None:
        steps(name, updates)
        run[name].reports += run[name].outer.flush()

    of = {name: [noise(10 * ord(name) + step) for step in range(4)] for name in "ab"}
    with run.hurry():
        run.together(**{name: partial(phase, name, of[name]) for name in "ab"})
    theta = first + lr * (sums(of["a"]) + sums(of["b"])) / 2
    close = partial(torch.testing.assert_close, rtol=0, atol=3e-6)
    close(run["a"].buffers[PARAMS].double(), theta)

    waits = 6 if overlap == 2 else 8 if overlap is None else 4
    """c has heard by this step that its round was committed without it, and has contributed all that it learned."""
    alone = 7 if overlap is not None else 11
    run.together(c=partial(steps, "c", learned[:alone]))
    assert run["c"].made_steps == alone and run["c"].outer.round == 1, "it stood still"
    close(run["c"].params.double(), theta + sums(learned[waits:alone]))

    still = [*of["a"], *[torch.zeros(22)] * 4]
    run.together(a=partial(phase, "a", still), b=partial(phase, "b", [*of["b"], *still[4:]]), c=run["c"].outer.flush)
    kept = 0.5 if config.merge == "mix" else 0.0
    left = kept if kept and overlap is None else 1.0  # of what a and b learned, after it was sent
    brought = {name: kept * (theta - first - left * sums(of[name])) for name in "ab"}
    second = theta - lr * (brought["a"] + brought["b"] - sums(learned[:waits])) / 3
    close(run["a"].buffers[PARAMS].double(), second)
    close(run["c"].params.double(), second + sums(learned[waits:alone]))
    assert_one_outer_state(run)
    plan = run.store.verdicts[-1].plan
    assert (plan.weights, plan.steps) == ((40, 40, 10 * waits), (4, 4, waits))
    assert run["a"].outer.progress.inner_step == 8, "what came late moved the run on twice"
    assert audit_of(run).is_exact and audit_of(run).trained == BATCH * (16 + waits)


def all_sent(**more: Any) -> SparseLocoConfig:
    return sparse(k=16, values="float32", decay=1.0, lr=0.5, **more)


@pytest.mark.parametrize("passed", [1, 2, 6])
@pytest.mark.parametrize(
    "config",
    [
        streaming(inner_steps=2),
        streaming(inner_steps=2, overlap="full"),
        streaming(inner_steps=4, fragments=2),
        all_sent(inner_steps=2),
        all_sent(inner_steps=2, overlap="full"),
        all_sent(inner_steps=4, fragments=2),
    ],
    ids=lambda c: f"{c.type}-{c.fragments}-{c.overlap}",
)
def test_what_no_round_counts_grows_with_each_phase_until_one_counts_all_of_it(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch, config: Any, passed: int
) -> None:
    """One node comes to each boundary in time, and the first rounds go without it. In float64, by the verdicts."""

    def kept_apart(_members: object, view: View, *_: object) -> frozenset[str]:
        assert view.committed is not None
        return frozenset({"c"} & view.ready.keys()) if view.committed.round < passed else frozenset()

    monkeypatch.setattr("zeroband.elastic.membership.round_rules._kept_apart", kept_apart)
    run = start_run(config, "a", "b", "c", model=ProblemModel, total_steps=24, journal_rounds=30)
    generator = torch.Generator().manual_seed(0)
    update = {name: [0.1 * torch.randn(LAYOUT.numel, generator=generator) for _ in range(60)] for name in "abc"}
    theta = run["a"].params.double()

    def steps(name: str) -> None:
        for round in range(1, 31):
            run[name].train(by(run[name], update[name]), 1)
            if name != "c" and round <= passed + 1 and config.overlap == 0:
                run.store.await_ready(round, "c")
            run[name].train(by(run[name], update[name]), 1)

    run.together(**{name: partial(steps, name) for name in "abc"})
    parts, at = fragments_of(LAYOUT, config.fragments), dict.fromkeys("abc", 0)
    begun = {name: [0] * len(parts) for name in "abc"}
    for round, verdict in enumerate(run.store.verdicts[1:]):
        plan, fragment_index = verdict.plan, round % len(parts)
        assert ("c" in plan.late) == (verdict.round <= passed)
        for member, made, share in zip(plan.members, plan.steps, plan.shares, strict=True):
            at[member] += made
            for first, last in parts[fragment_index].ranges:
                theta[first:last] += (
                    0.5 * share * sums(update[member][begun[member][fragment_index] : at[member]])[first:last]
                )
            begun[member][fragment_index] = at[member]
    torch.testing.assert_close(run["a"].buffers[PARAMS].double(), theta, rtol=0, atol=1e-5)
    assert_one_outer_state(run)
    first = next(v.plan for v in run.store.verdicts if "c" in v.plan.contributors())
    held, grows = first.contributors()["c"], 1 + (config.overlap == "full")
    most = 2 * min(passed - 1 + grows, MAX_LATE_PHASES)
    # where nobody overlaps, it may hear of a missed round after the first step of a phase; the second one counts later
    assert held == most or (config.overlap == 0 and passed > 1 and held == most - 1)
    assert first.phase_steps == ((2, 2, 2) if held > 2 else ())
    assert run["c"].made_steps - run["a"].outer.progress.tokens // 10 + 2 * at["a"] == 0
    assert audit_of(run).is_exact
