"""Fragments, overlapped rounds, delayed and eager updates as nodes run them, against oracles, and under losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles.diloco import delayed, diloco, eager
from tests.oracles.problem import LAYOUT, Forgetful, Problem, ProblemModel, Steady
from tests.oracles.sparse import runs_of
from tests.oracles.streaming import Adam, Nesterov, OuterRule, Sparse, streaming
from tests.unit.audits import audit_of
from tests.unit.outer.background import ROUND, WATCH, await_end
from torch import Tensor

from zeroband.config.outer import ClipConfig, CustomConfig, DilocoConfig, OuterSGDConfig, RoundsConfig, SparseLocoConfig
from zeroband.data.ledger import SHARED, Ledger
from zeroband.elastic.rounds.background import BoundaryWatch
from zeroband.outer import many_steps
from zeroband.outer.many_steps import PARAMS
from zeroband.outer.sparseloco import error_rule
from zeroband.state.fragments import Fragment, fragments_of

StartRun = Callable[..., Any]
Run = Any

H, ROUNDS, BATCH = 4, 8, 4
NAMES = ("a", "b", "c", "d")


def diloco_with(lr: float = 0.4, momentum: float = 0.9, **settings: Any) -> DilocoConfig:
    sgd = OuterSGDConfig(lr=lr, momentum=momentum, nesterov=momentum > 0)
    return DilocoConfig.model_validate({"type": "diloco", "inner_steps": H, **settings, "optimizer": sgd})


def sparseloco_with(**settings: Any) -> SparseLocoConfig:
    divisor = "members" if settings.get("merge") == "eager" else "senders"
    given = {"type": "sparseloco", "inner_steps": H, "k": 5, "chunk": 4, "divisor": divisor, **settings}
    return SparseLocoConfig.model_validate(given)


FED_ADAM = str(Path(__file__).resolve().parents[3] / "examples" / "fed_adam.py")


def fed_adam_with(**settings: Any) -> CustomConfig:
    return CustomConfig.model_validate({"type": "custom", "algorithm": FED_ADAM, "inner_steps": H, **settings})


MakeConfig = Callable[..., RoundsConfig]
ALGORITHMS: dict[str, MakeConfig] = {
    "diloco": diloco_with,
    "sparseloco": sparseloco_with,
    "fed_adam": fed_adam_with,
}


@pytest.fixture
def train(start_run: StartRun) -> Callable[..., Run]:
    """train(config, nodes, steps): a run of these nodes after so many inner steps of the oracles' problem."""

    def start(config: RoundsConfig, nodes: int, steps: int, **settings: Any) -> Run:
        run = start_run(config, *NAMES[:nodes], model=ProblemModel, **settings)
        go_on(run, steps)
        return run

    return start


def go_on(run: Run, steps: int, *names: str, nodes: int | None = None) -> dict[str, Any]:
    names = names or tuple(run.nodes)
    problem = Problem(nodes or len(names))
    works = {n: partial(run[n].train, partial(problem.inner_step, NAMES.index(n)), steps) for n in names}
    return run.together(**works)


def assert_one_outer_state(run: Run, *names: str) -> None:
    first, *others = names or tuple(run.nodes)
    for other in others:
        assert run[other].outer.state_digest == run[first].outer.state_digest
        for section in run[first].outer.sections:
            assert torch.equal(run[other].buffers[section], run[first].buffers[section])


# -- against the oracles --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_eager_replicas_are_those_of_the_paper(train: Callable[..., Run], nodes: int) -> None:
    config = diloco_with(lr=0.2, overlap="full", merge="eager")
    run = train(config, nodes, 0)
    expected = eager(Problem(nodes), ROUNDS, H, 0.2, 0.9)
    for round in range(ROUNDS):
        go_on(run, H)
        for name, theta in zip(NAMES, expected[round], strict=False):
            torch.testing.assert_close(run[name].params, theta, atol=3e-6, rtol=0)
    assert_one_outer_state(run)
    assert audit_of(run).is_exact


@pytest.mark.parametrize("flush_every", [None, 6])
@pytest.mark.parametrize("paces", [(1, 3), (1, 2, 7)], ids=["10:30", "10:20:70"])
def test_eager_updates_count_by_tokens_from_the_first_phase_on_and_after_each_flush(
    start_run: StartRun, paces: tuple[int, ...], flush_every: int | None
) -> None:
    """Ten tokens a step, so the weights of a round are those in the ids."""
    names, problem = NAMES[: len(paces)], Steady(len(paces))
    config = diloco_with(lr=0.2, overlap="full", merge="eager", inner_steps=max(paces))
    pace = dict(zip(names, paces, strict=True))
    run = start_run(config, *names, model=ProblemModel, pace=pace, flush_every=flush_every)
    expected = eager(problem, ROUNDS, paces, 0.2, 0.9, weights=paces, flush_every=flush_every)
    for round in range(ROUNDS):
        go_on_by(run, problem, pace)
        for name, theta in zip(names, expected[round], strict=True):
            torch.testing.assert_close(run[name].params, theta, atol=3e-6, rtol=0)
    assert_one_outer_state(run)
    assert audit_of(run).is_exact


def go_on_by(run: Run, problem: Problem, pace: dict[str, int], tokens: dict[str, int] | None = None) -> None:
    """A phase of each node, of its own length."""
    work = {n: partial(run[n].train, partial(problem.inner_step, NAMES.index(n)), steps) for n, steps in pace.items()}
    run.together(**{name: partial(train, tokens=(tokens or {}).get(name, 10)) for name, train in work.items()})


@pytest.mark.parametrize("weights", [(10, 30), (10, 20, 70)])
def test_share_that_was_not_known_when_a_contribution_was_sent_is_put_right_when_it_is(
    start_run: StartRun, weights: tuple[int, ...]
) -> None:
    """Steps of unequal tokens: nobody can tell before the first round. From its mean on, the views are the oracle's."""
    names = NAMES[: len(weights)]
    run = start_run(diloco_with(lr=0.2, overlap="full", merge="eager"), *names, model=ProblemModel)
    tokens, pace = dict(zip(names, weights, strict=True)), dict.fromkeys(names, H)
    problem = Forgetful(len(weights))
    expected = eager(problem, 8, H, 0.2, 0.9, weights=weights)
    for round in range(8):
        go_on_by(run, problem, pace, tokens)
        off = max(float((run[n].params - theta).abs().max()) for n, theta in zip(names, expected[round], strict=True))
        assert (off > 0.01) if round == 0 else (off < 3e-6)
    assert_one_outer_state(run)


@pytest.mark.parametrize("nodes", [1, 2])
def test_eager_replicas_of_sparse_updates_count_what_they_sent(train: Callable[..., Run], nodes: int) -> None:
    """What a payload left in the errors comes later, for the node itself as for the others."""
    config = sparseloco_with(lr=0.5, overlap="full", merge="eager")
    rule = rule_of("sparseloco", fragments_of(LAYOUT, 1))
    run, whole = train(config, nodes, 0), list(range(LAYOUT.numel))
    expected = eager(Problem(nodes), ROUNDS, H, 0.5, 0.0, lambda node, delta: rule.sent(node, 0, whole, delta))
    for round in range(ROUNDS):
        go_on(run, H)
        for name, theta in zip(NAMES, expected[round], strict=False):
            torch.testing.assert_close(run[name].params, theta, atol=3e-6, rtol=0)
    assert_one_outer_state(run)
    assert audit_of(run).is_exact


def test_eager_updates_of_one_node_are_diloco(train: Callable[..., Run]) -> None:
    expected = diloco(Problem(1), ROUNDS, H, 0.4, 0.9)[-1]
    run = train(diloco_with(overlap="full", merge="eager"), 1, ROUNDS * H)
    torch.testing.assert_close(run["a"].params, expected, atol=3e-6, rtol=0)


def test_delayed_updates_are_those_of_the_paper_bit_for_bit(train: Callable[..., Run]) -> None:
    run = train(diloco_with(lr=0.1, overlap="full"), 2, 0)
    for theta in delayed(Problem(2), ROUNDS, H, 0.1, 0.9):
        go_on(run, H)
        assert all(torch.equal(node.params, theta) for node in run.nodes.values())


def rule_of(name: str, fragments: Sequence[Fragment]) -> OuterRule:
    """What the oracle does in the place of this algorithm."""
    match name:
        case "diloco":
            return Nesterov(0.4, 0.9)
        case "fed_adam":
            return Adam(0.003, 0.9, 0.99, 0.001)
        case _:
            config = sparseloco_with()
            codecs = [error_rule(config, LAYOUT.only(fragment.names)).codec for fragment in fragments]
            return Sparse(config.lr, config.decay, [runs_of(codec) for codec in codecs], config.divisor)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize(
    ("fragments", "overlap", "alpha"), [(1, 0, 0.5), (1, 3, 0.0), (2, 0, 0.0), (2, 1, 0.0), (2, 1, 0.5), (4, 0, 0.5)]
)
def test_every_schedule_is_its_oracle_bit_for_bit(
    train: Callable[..., Run], algorithm: str, fragments: int, overlap: int, alpha: float
) -> None:
    settings = {"fragments": fragments, "overlap": overlap, "merge": "mix", "alpha": alpha}
    run, parts = train(ALGORITHMS[algorithm](**settings), 2, 0), fragments_of(LAYOUT, fragments)
    indices = [[i for a, b in f.ranges for i in range(a, b)] for f in parts]
    for steps in (3, H * ROUNDS):
        go_on(run, steps - run["a"].outer.inner_step)
        rule = rule_of(algorithm, parts)
        outer, replicas = streaming(Problem(2), steps, H, indices, overlap, alpha, rule)
        assert torch.equal(run["a"].buffers[PARAMS], outer)
        assert all(torch.equal(run[name].params, theta) for name, theta in zip(NAMES, replicas, strict=False))
    assert audit_of(run).is_exact


@pytest.mark.parametrize(
    ("settings", "since"), [({}, 0), ({"overlap": 3, "merge": "mix"}, 30), ({"overlap": "full"}, 40)]
)
def test_report_of_a_round_says_what_was_learned_since_it_was_contributed_to(
    train: Callable[..., Run], settings: dict[str, Any], since: int
) -> None:
    run = train(diloco_with(**settings), 2, 2 * H)
    assert {report.uncommitted_tokens for report in run["a"].reports} == {since}


@pytest.mark.parametrize("settings", [{}, {"merge": "mix", "alpha": 0.0}])
def test_one_fragment_that_is_waited_for_is_diloco_bit_for_bit(
    train: Callable[..., Run], settings: dict[str, Any]
) -> None:
    expected = diloco(Problem(2), ROUNDS, H, 0.7, 0.9)[-1]
    run = train(diloco_with(lr=0.7, **settings), 2, ROUNDS * H)
    assert torch.equal(run["a"].params, expected) and torch.equal(run["b"].params, expected)


# -- nobody stands still --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("merge", ["overwrite", "eager"])
def test_nobody_waits_for_the_round_after_one_with_other_members(train: Callable[..., Run], merge: str) -> None:
    """A node that was lost in the second round costs the others no wait in the third: each contributes by itself."""
    run = train(diloco_with(lr=0.2, overlap="full", merge=merge), 3, 2 * H, inject={"c": ["reduced@2=SIGKILL"]})
    go_on(run, H - 1, "a", "b", nodes=3)
    go_on(run, 1, "a", nodes=3)
    assert run["a"].outer.round == 2 and run.store.verdicts[-1].members == ("a", "b")
    go_on(run, 1, "b", nodes=3)
    go_on(run, 3 * H, "a", "b", nodes=3)
    assert_one_outer_state(run, "a", "b")
    assert audit_of(run).is_exact


def called(run: Run, name: str) -> bool:
    await_end(WATCH)
    return run[name].outer.is_time_over(1)


def test_joiner_and_late_member_by_time_come_when_the_others_stand_at_the_boundary(
    start_run: StartRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their phases are cut short, so both count with the others in the next round, with all that they learned."""
    monkeypatch.setattr(many_steps, "BoundaryWatch", partial(BoundaryWatch, look_s=0.002))
    config = diloco_with(inner_steps=None, inner_seconds=1e6, overlap="full")
    run = start_run(config, "a", "b", model=ProblemModel)
    run.add("c").receive(run["a"])
    run["c"].join()
    step = torch.full((LAYOUT.numel,), 0.1)

    def contribute(*names: str) -> None:
        for name in names:
            run[name].diloco_step(step, 10, ends_round=True)

    def newest_weights() -> tuple[int, ...]:
        await_end(ROUND)
        return run.store.verdicts[-1].plan.weights

    for name in ("a", "b", "c"):
        run[name].diloco_step(step, 10, ends_round=False)
    assert not any(run[name].outer.is_time_over(1) for name in ("a", "b", "c"))
    contribute("a")
    assert called(run, "c"), "one is there"
    contribute("c", "b")
    assert newest_weights() == (20, 20, 20)
    with run.hurry():
        contribute("a", "b")
        assert newest_weights() == (10, 10)
    contribute("c")
    await_end(ROUND)
    run["c"].diloco_step(step, 10, ends_round=False)
    assert not run["c"].outer.is_time_over(1)
    contribute("a")
    assert called(run, "c")
    contribute("c", "b")
    assert newest_weights() == (10, 10, 30)
    run["c"].diloco_step(step, 10, ends_round=False)
    assert not run["c"].outer.is_time_over(1)
    contribute("a")
    assert not called(run, "c"), "its phase ends with its time again"
    contribute("b", "c")
    assert newest_weights() == (10, 10, 20)
    assert audit_of(run).is_exact


# -- where all nodes hold one model ---------------------------------------------------------------------------------

WAYS = {
    "delayed": {"overlap": "full"},
    "eager": {"overlap": "full", "merge": "eager"},
    "eager fragments": {"overlap": "full", "merge": "eager", "fragments": 2},
    "streaming": {"overlap": 1, "merge": "mix", "fragments": 2},
    "overwritten": {"overlap": 2},
    "mixed at once": {"merge": "mix"},
    "fragments": {"fragments": 4},
}
OTHERS = {"sparseloco": ("eager",), "fed_adam": ("streaming",)}
"""The loop is one; what may differ is whose rounds it runs: one that remembers errors, one of another optimizer."""


def in_ways(*ways: str) -> pytest.MarkDecorator:
    """A test of DiLoCo in these ways, and of the others in theirs."""
    cases = [("diloco", way) for way in ways] + [(name, way) for name, theirs in OTHERS.items() for way in theirs]
    settings = [pytest.param(ALGORITHMS[name], WAYS[way], id=f"{name}-{way}") for name, way in cases]
    return pytest.mark.parametrize(("make", "settings"), settings)


every_algorithm_and_way = in_ways(*WAYS)
every_algorithm_beside_training = in_ways("delayed", "eager fragments", "streaming", "overwritten")
"""For what happens to nodes: what a way adds to these, the end of a run and a checkpoint show in every way."""


@every_algorithm_and_way
def test_run_ends_with_one_model_on_all_nodes(
    train: Callable[..., Run], make: MakeConfig, settings: dict[str, Any]
) -> None:
    run = train(make(**settings), 2, 1000, total_steps=5 * H + 3)
    assert_one_outer_state(run)
    for node in run.nodes.values():
        assert node.outer.progress.is_complete and node.outer.progress.inner_step == 5 * H + 3
        assert torch.equal(node.params, node.buffers[PARAMS])
        assert [report.round for report in node.reports] == list(range(1, len(node.reports) + 1))
    last = run["a"].outer.progress
    assert last.ledgers == {SHARED: Ledger(2 * (5 * H + 3) * BATCH)}
    assert last.tokens == 2 * (5 * H + 3) * 10
    assert audit_of(run).is_exact


MERGES = {"overwrite": 0.0, "mix": 0.5, "eager": 1.0}
"""What each leaves of the inner steps that were made while a round travelled."""


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("last", range(1, H + 1))
def test_last_phase_of_any_length_is_learned_once(train: Callable[..., Run], merge: str, last: int) -> None:
    total = 2 * H + last
    node = train(diloco_with(lr=1.0, momentum=0.0, overlap=2, merge=merge), 1, total - 1, total_steps=total)["a"]
    expected = Problem(1).inner_step(0, total, node.params)
    node.train(partial(Problem(1).inner_step, 0), 1)
    torch.testing.assert_close(node.buffers[PARAMS], expected, atol=1e-6, rtol=0)
    assert torch.equal(node.params, node.buffers[PARAMS])


@pytest.mark.parametrize("merge", MERGES)
def test_node_that_leaves_while_its_round_travels_hands_over_what_merging_leaves(
    train: Callable[..., Run], merge: str
) -> None:
    node = train(diloco_with(lr=1.0, momentum=0.0, overlap=2, merge=merge), 1, H)["a"]
    sent, step = node.params, torch.full((LAYOUT.numel,), 0.1)
    node.departure.drain()
    node.diloco_step(step, 10, ends_round=True)
    torch.testing.assert_close(node.buffers[PARAMS], sent + MERGES[merge] * step, atol=1e-6, rtol=0)


@every_algorithm_beside_training
def test_run_of_nodes_of_unequal_pace_ends_with_one_model(
    train: Callable[..., Run], make: MakeConfig, settings: dict[str, Any]
) -> None:
    config = make(inner_steps=4 * H, **settings)
    run = train(config, 2, 1000, total_steps=9 * H, pace={"b": 1})
    assert_one_outer_state(run)
    for node in run.nodes.values():
        assert node.outer.progress.is_complete
        assert torch.equal(node.params, node.buffers[PARAMS])
    assert all(verdict.members == ("a", "b") for verdict in run.store.verdicts)
    assert audit_of(run).is_exact


@every_algorithm_beside_training
def test_node_that_joins_with_the_last_inner_steps_ends_with_the_others(
    train: Callable[..., Run], make: MakeConfig, settings: dict[str, Any]
) -> None:
    config = make(**settings)
    run = train(config, 1, 2 * H, total_steps=2 * H + config.phase_steps)
    run["a"].outer.flush()
    joiner = run.add("b")
    joiner.receive(run["a"])
    assert joiner.join() is None
    go_on(run, 1000, nodes=2)
    assert_one_outer_state(run)
    assert run.store.verdicts[-1].members == ("a", "b")
    for node in run.nodes.values():
        assert node.outer.progress.is_complete
        assert torch.equal(node.params, node.buffers[PARAMS])
    assert audit_of(run).is_exact


@every_algorithm_and_way
def test_checkpoint_finds_one_model_on_all_nodes(
    train: Callable[..., Run], make: MakeConfig, settings: dict[str, Any]
) -> None:
    run, found = train(make(**settings), 2, 0, flush_every=5), 0
    for _ in range(6 * H):
        before = run["a"].outer.round
        go_on(run, 1)
        if before < run["a"].outer.round and run["a"].outer.round % 5 == 0:
            found += 1
            for node in run.nodes.values():
                assert torch.equal(node.params, node.buffers[PARAMS])
    assert found
    assert_one_outer_state(run)


@every_algorithm_beside_training
def test_node_lost_in_a_round_beside_training_costs_nobody_a_step(
    train: Callable[..., Run], make: MakeConfig, settings: dict[str, Any]
) -> None:
    run = train(make(**settings), 3, 6 * H, inject={"c": ["reduced@4=SIGKILL"]}, total_steps=8 * H)
    go_on(run, 1000, "a", "b", nodes=3)
    assert_one_outer_state(run, "a", "b")
    assert audit_of(run).is_exact
    after = [verdict for verdict in run.store.verdicts if verdict.round >= 4]
    assert all(verdict.members == ("a", "b") for verdict in after)
    assert run["a"].outer.progress.is_complete


@every_algorithm_beside_training
def test_joiner_holds_the_outer_state_of_the_others(
    train: Callable[..., Run], make: MakeConfig, settings: dict[str, Any]
) -> None:
    """To the end of the run: members that stopped before would leave it waiting for them."""
    run = train(make(**settings), 2, 3 * H, total_steps=9 * H)
    run.together(a=run["a"].outer.flush, b=run["b"].outer.flush)
    joiner = run.add("c")
    joiner.receive(run["a"])
    assert joiner.join() is None
    go_on(run, 1000, nodes=3)
    assert all(node.outer.progress.is_complete for node in run.nodes.values())
    assert any("c" in verdict.plan.contributors() for verdict in run.store.verdicts)
    assert_one_outer_state(run)
    assert audit_of(run).is_exact


@every_algorithm_beside_training
def test_update_that_is_not_finite_is_left_out_and_its_samples_are_trained_by_others(
    train: Callable[..., Run], make: MakeConfig, settings: dict[str, Any]
) -> None:
    run = train(make(**settings), 2, 3 * H - 1)
    run["b"].set_params(torch.full((LAYOUT.numel,), float("nan")))
    go_on(run, 4 * H)
    run.together(**{name: node.outer.flush for name, node in run.nodes.items()})
    assert any(report.is_left_out for report in run["b"].reports)
    assert all(torch.isfinite(node.params).all() for node in run.nodes.values())
    assert_one_outer_state(run)
    assert audit_of(run).is_exact


@pytest.mark.parametrize("way", [way for way, settings in WAYS.items() if settings.get("merge") != "eager"])
def test_update_that_is_too_long_counts_as_the_median_one(train: Callable[..., Run], way: str) -> None:
    run = train(diloco_with(**WAYS[way], robust=ClipConfig(type="clip")), 3, 3 * H - 1)
    run["c"].set_params(run["c"].params + 1e6)
    go_on(run, 3 * H)
    run.together(**{name: node.outer.flush for name, node in run.nodes.items()})
    assert run["a"].buffers[PARAMS].abs().max() < 100
    assert_one_outer_state(run)


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": "full", "merge": "eager"},
        {"overlap": 3},
        {"overlap": 50, "merge": "mix"},
        {"fragments": 2},
        {"fragments": 2, "overlap": "full", "merge": "mix"},
        {"fragments": 4, "overlap": "full", "merge": "eager"},
    ],
    ids=str,
)
def test_phases_that_end_by_time_go_with_every_way(train: Callable[..., Run], settings: dict[str, Any]) -> None:
    """The first have eight steps; an overlap that is longer than a phase ends with it."""
    config = diloco_with(**settings, inner_steps=None, inner_seconds=3600)
    run = train(config, 2, 1000, total_steps=100)
    assert run["a"].outer.progress.is_complete
    assert_one_outer_state(run)
    assert audit_of(run).is_exact


def test_training_does_not_wait_for_a_round_that_travels(train: Callable[..., Run]) -> None:
    run = train(diloco_with(overlap="full", merge="eager"), 2, 0)
    go_on(run, 2 * H - 1, "a", nodes=2)  # b has not come to its boundary at all
    assert (run["a"].outer.round, run["a"].outer.inner_step) == (0, 2 * H - 1)
    outcome = run.together(
        a=partial(run["a"].train, partial(Problem(2).inner_step, 0), 1),
        b=partial(run["b"].train, partial(Problem(2).inner_step, 1), 2 * H),
    )
    assert outcome and (run["a"].outer.round, run["b"].outer.round) == (1, 1)


def test_own_parameters_move_at_once_under_eager_updates(train: Callable[..., Run]) -> None:
    run = train(diloco_with(overlap="full", merge="eager"), 2, 0)
    before: Tensor = run["a"].buffers[PARAMS].clone()
    go_on(run, H, "a", nodes=2)
    assert torch.equal(run["a"].buffers[PARAMS], before)
    assert not torch.equal(run["a"].params, before)
    go_on(run, H, "b", nodes=2)
    run.together(a=run["a"].outer.flush, b=run["b"].outer.flush)
    assert_one_outer_state(run)
