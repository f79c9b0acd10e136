"""Nodes with documents of their own: whoever is lost, late, joins or goes back, each node's samples are its own."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.oracles.problem import SHAPES
from tests.unit.audits import audit_of
from tests.unit.conftest import ModelOf
from torch import Tensor

from zeroband.config import load_config
from zeroband.config.outer import (
    CustomConfig,
    DdpConfig,
    DemoConfig,
    DilocoConfig,
    OuterSGDConfig,
    RoundsConfig,
    SparseLocoConfig,
)
from zeroband.config.schema import RollbackConfig
from zeroband.data.ledger import Ledger, take
from zeroband.elastic.membership.orders import roll_back
from zeroband.elastic.membership.progress import Progress, deal_claims
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.rounds.rollback import RolledBack
from zeroband.errors import ConfigError
from zeroband.outer.payloads import counted_of
from zeroband.runtime.run_rules import rules_of

BATCH = 4
CORPORA = {"a": "a/1", "b": "b/2", "b again": "b/2", "b-again": "b/2", "b other": "b/9", "c": "c/3"}
FED_ADAM = str(Path(__file__).resolve().parents[3] / "examples" / "fed_adam.py")
SGD = OuterSGDConfig(lr=0.7, momentum=0.9)
DILOCO = DilocoConfig(type="diloco", inner_steps=1, optimizer=SGD)
DDP = DdpConfig(type="ddp")

Algorithm = DilocoConfig | DdpConfig | DemoConfig | SparseLocoConfig | CustomConfig
Run = Any
StartRun = Callable[..., Run]
Noise = Callable[..., Tensor]

ALGORITHMS = pytest.mark.parametrize(
    "algorithm",
    [
        DILOCO,
        DDP,
        DemoConfig(type="demo"),
        SparseLocoConfig(type="sparseloco", inner_steps=1),
        CustomConfig(type="custom", algorithm=FED_ADAM, inner_steps=1),
    ],
    ids=["diloco", "ddp", "demo", "sparseloco", "custom"],
)
OVERLAPS = pytest.mark.parametrize(
    "algorithm",
    [
        DilocoConfig(type="diloco", inner_steps=4, fragments=2, overlap=1, merge="mix", optimizer=SGD),
        DilocoConfig(type="diloco", inner_steps=2, overlap="full", merge="eager", optimizer=SGD),
        SparseLocoConfig(type="sparseloco", inner_steps=2, overlap="full"),
    ],
    ids=["streaming", "eager", "sparseloco"],
)


def trained_by(run: Run) -> Mapping[str, Counter[int]]:
    """The samples behind the updates that counted, by the node's name, on a line of rounds that never went back."""
    trained: dict[str, Counter[int]] = defaultdict(Counter)
    before = Progress.at_start()
    for verdict in run.store.verdicts:
        ledgers = deal_claims(dict(verdict.plan.claims), before.ledgers)
        held = replace(before, ledgers=ledgers).assigned
        for member, steps in verdict.plan.contributors().items():
            for start, stop in take(held[member], steps * BATCH)[0]:
                trained[member.partition(" ")[0].partition("-")[0]].update(range(start, stop))
        before = Progress.from_record(verdict.record["progress"])
    return trained


def ledgers_of(run: Run) -> Mapping[str, Ledger]:
    return Progress.from_record(run.store.verdicts[-1].record["progress"]).ledgers


def join(run: Run, name: str, noise: Noise, *others: str) -> None:
    run.add(name).receive(run["a"])
    run.round_with_joiner(name, **{other: noise(len(run.nodes)) for other in others})


@ALGORITHMS
def test_lost_node_finds_its_samples_again_and_a_third_one_brings_its_own(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b", corpora=CORPORA, inject={"b": ["opened@2=SIGKILL"]})
    run.round(a=noise(1), b=noise(2))
    assert run["a"].outer.progress.assigned == {"a": ((4, 8),), "b": ((4, 8),)}
    run.round(a=noise(3), b=noise(4))
    assert ledgers_of(run) == {"a/1": Ledger(12, (), {"a": ((8, 12),)}), "b/2": Ledger(8, ((4, 8),))}
    run.round(a=noise(5))
    assert ledgers_of(run)["b/2"] == Ledger(8, ((4, 8),)), "what is b's is dealt to nobody else"
    join(run, "b again", noise, "a")
    assert run["b again"].outer.upcoming() == ((4, 8),)
    run.round(**{"a": noise(6), "b again": noise(7)})
    run.add("c").receive(run["a"])
    run.round_with_joiner("c", **{"a": noise(8), "b again": noise(9)})
    learned = 0 if isinstance(algorithm, DdpConfig | DemoConfig) else 4  # with these it has to be in a round first
    assert run["c"].outer.upcoming() == ((learned, learned + 4),)
    run.round(**{"a": noise(10), "b again": noise(11), "c": noise(12)})
    assert len({node.outer.state_digest for name, node in run.nodes.items() if name != "b"}) == 1
    of_b, of_c = 16 + learned, 4 + learned
    assert trained_by(run) == {"a": Counter(range(28)), "b": Counter(range(of_b)), "c": Counter(range(of_c))}
    found = audit_of(run)
    assert found.is_exact
    assert {corpus: account.trained for corpus, account in found.accounts.items()} == {
        "a/1": 28,
        "b/2": of_b,
        "c/3": of_c,
    }


def test_node_that_comes_back_with_other_documents_begins_with_their_first(start_run: StartRun, noise: Noise) -> None:
    run = start_run(DILOCO, "a", "b", corpora=CORPORA, inject={"b": ["opened@2=SIGKILL"]})
    run.round(a=noise(1), b=noise(2))
    run.round(a=noise(3), b=noise(4))
    join(run, "b other", noise, "a")
    assert run["b other"].outer.upcoming() == ((4, 8),), "it learned from the first ones before"
    run.round(**{"a": noise(5), "b other": noise(6)})
    accounts = audit_of(run).accounts
    assert (accounts["b/2"].trained, accounts["b/2"].owed, accounts["b/9"].trained) == (4, 4, 8)


def test_late_node_keeps_its_samples_and_its_own_only(start_run: StartRun, noise: Noise) -> None:
    config = DilocoConfig(type="diloco", inner_steps=2, optimizer=SGD)
    run = start_run(config, "a", "b", "c", corpora=CORPORA)
    with run.hurry():
        run.together(
            a=partial(run["a"].take_steps, [noise(1), noise(2)], 10), b=partial(run["b"].take_steps, [noise(3)] * 1, 10)
        )
    assert ledgers_of(run)["c/3"] == Ledger(16, (), {"c": ((0, 8), (8, 16))})
    assert ledgers_of(run)["b/2"] == Ledger(12, (), {"b": ((4, 12),)})
    run.round_with_late("c", [noise(4)], a=noise(5), b=noise(6))
    assert ledgers_of(run)["c/3"].assigned == {"c": ((4, 8), (8, 16))}
    assert trained_by(run)["c"] == Counter(range(4))
    assert audit_of(run).is_exact


def train(run: Run, steps: int, *names: str) -> None:
    run.together(**{n: partial(run[n].train, lambda step, theta: theta + 0.01 * step, steps) for n in names})


@pytest.mark.slow
@OVERLAPS
def test_rounds_beside_training_settle_for_each_node_where_one_is_lost_and_comes_back(
    start_run: StartRun, algorithm: RoundsConfig
) -> None:
    """Nodes hold the samples of two rounds there."""
    names = ("a", "b", "c")
    model = partial(ModelOf, SHAPES)
    run = start_run(algorithm, *names, corpora=CORPORA, model=model, inject={"b": ["reduced@4=SIGKILL"]})
    train(run, 16, *names)
    owed = ledgers_of(run)["b/2"]
    assert owed.returned and not owed.assigned
    others = {corpus: ledger.next for corpus, ledger in ledgers_of(run).items()}
    train(run, 8, "a", "c")
    assert ledgers_of(run)["b/2"] == owed, "what is b's is dealt to nobody else"
    assert ledgers_of(run)["a/1"].next > others["a/1"] and ledgers_of(run)["c/3"].next > others["c/3"]
    run.together(a=run["a"].outer.flush, c=run["c"].outer.flush)
    run.add("b again").receive(run["a"])
    run["b again"].join()
    assert run["b again"].outer.upcoming()[0][0] == owed.next, "those that went back are dealt to it by a round"
    train(run, 16, "a", "b again", "c")
    assert ledgers_of(run)["b/2"].returned == ()
    trained = trained_by(run)
    assert all(set(counts.values()) == {1} for counts in trained.values()) and set(trained) == set(names)
    assert audit_of(run).is_exact


def go_back(run: Run, noise: Noise, *names: str) -> None:
    """A round of which these members learn that they go back; they take the checkpoint."""
    outcomes = run.together(**{name: partial(run[name].take_step, noise(50), 10) for name in names})
    for name, outcome in outcomes.items():
        assert isinstance(outcome, RolledBack), outcome
        run[name].inner.zero_grad()
        run[name].outer.adopt(outcome.report.round, outcome.record, run.checkpoints[outcome.step][0].sections)
        run[name].steps = 0


@pytest.mark.parametrize("algorithm", [DILOCO, DDP], ids=["diloco", "ddp"])
@pytest.mark.parametrize("skips_data", [False, True])
def test_run_that_goes_back_deals_to_each_node_its_own_samples_again_or_skips_them(
    start_run: StartRun, noise: Noise, algorithm: DilocoConfig | DdpConfig, skips_data: bool
) -> None:
    run = start_run(algorithm, "a", "b", corpora=CORPORA, rollback=RollbackConfig())
    run.round(a=noise(1), b=noise(2))
    run.checkpoints[1] = (run["a"].outer.copy_state(), ("a", "b", "c"))
    run.add("c").receive(run["a"])
    run.round_with_joiner("c", a=noise(3), b=noise(4))
    run.round(a=noise(5), b=noise(6), c=noise(7))
    run.store.give_orders(lambda given: replace(roll_back(given, 1, [1]), skips_data=skips_data))
    go_back(run, noise, "a", "b", "c")
    of_c = 4 if isinstance(algorithm, DdpConfig) else 8  # one that trains first has learned in both rounds
    at = {"a": 12, "b": 12, "c": of_c} if skips_data else {"a": 4, "b": 4, "c": 0}
    assert run["a"].outer.progress.assigned == {name: ((start, start + 4),) for name, start in at.items()}
    left_out = run.store.verdicts[-1].record["skipped"]
    assert left_out == ({"a/1": ((4, 12),), "b/2": ((4, 12),), "c/3": ((0, of_c),)} if skips_data else {})
    run.round(a=noise(8), b=noise(9), c=noise(10))
    found = audit_of(run)
    assert found.is_exact
    assert {corpus: one.trained for corpus, one in found.accounts.items()} == {"a/1": 8, "b/2": 8, "c/3": 4}


WEIGHED = {
    "diloco": DILOCO,
    "ddp": DDP,
    "sparseloco": SparseLocoConfig(type="sparseloco", inner_steps=1, k=4096),
    "custom": CustomConfig(type="custom", algorithm=FED_ADAM, inner_steps=1),
}


@pytest.mark.parametrize("kind", WEIGHED)
def test_nodes_that_count_equally_make_of_unequal_tokens_what_equal_ones_would(
    start_run: StartRun, noise: Noise, kind: str
) -> None:
    def digest_of_round(weights: str, **tokens: int) -> str:
        run = start_run(WEIGHED[kind].model_copy(update={"weights": weights}), *tokens)
        works = {n: partial(run[n].take_step, noise(seed), t) for seed, (n, t) in enumerate(tokens.items())}
        report = run.together(**works)[next(iter(tokens))]
        assert report.weights == tuple(tokens.values()) and report.progress.tokens == sum(tokens.values())
        return report.state_digest

    expected = digest_of_round("tokens", a=20, b=20)
    assert digest_of_round("equal", c=30, d=10) == expected
    assert digest_of_round("tokens", e=30, f=10) != expected


def test_node_without_weight_counts_for_nothing_where_the_others_count_equally(
    start_run: StartRun, noise: Noise
) -> None:
    run = start_run(DILOCO.model_copy(update={"weights": "equal"}), "a", "b", "c")
    run.round(a=noise(1), b=float("nan") * noise(2), c=noise(3))
    assert run.store.verdicts[-1].plan.shares == (0.5, 0.0, 0.5)


def test_payload_that_is_left_out_leaves_equal_shares_to_the_others() -> None:
    plan = RoundPlan(1, 1, 1, ("a", "b", "c"), (30, 10, 20), is_equal=True)
    for shares in counted_of(plan, ["a", "c"]):
        assert shares == pytest.approx((0.5, 0.5))
    for shares in counted_of(replace(plan, is_equal=False), ["a", "c"]):
        assert shares == pytest.approx((0.6, 0.4))


@pytest.mark.parametrize("kind", ["diloco", "ddp", "sparseloco"])
def test_configuration_says_how_nodes_count(kind: str) -> None:
    environ = {"ZERO_BAND_STORE__URL": "redis://h", "ZERO_BAND_OUTER__TYPE": kind}
    assert rules_of(load_config(["--outer.weights=equal"], environ)).counts_equally
    assert not rules_of(load_config([], environ)).counts_equally


def test_payloads_of_demo_count_the_same_and_take_no_weights() -> None:
    environ = {"ZERO_BAND_STORE__URL": "redis://h", "ZERO_BAND_OUTER__TYPE": "demo"}
    with pytest.raises(ConfigError, match=r"outer\.weights"):
        load_config(["--outer.weights=equal"], environ)
