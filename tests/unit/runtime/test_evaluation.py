"""Evaluation while a node trains: real runs of one node, with it and without, and its parts alone."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tests.memberships import hold_leases_here
from tests.unit.runtime.conftest import BATCH, LENGTH, Build, config_of
from torch import Tensor, nn

from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.progress import Progress
from zeroband.errors import ConfigError
from zeroband.export.evaluation import evaluate
from zeroband.node.mesh import LocalMesh
from zeroband.observe.facts import FolderFacts
from zeroband.observe.metrics import METRICS, metric_of
from zeroband.observe.status import RunReader, render
from zeroband.runtime import loop
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.evaluation import (
    USUAL_BATCHES,
    EvaluationSet,
    HeldOutEvaluations,
    HeldOutScorer,
    open_evaluation_sets,
    open_scorer,
    swapped_parameters,
)
from zeroband.state.flat import FlatLayout, ShardMap, parameter_shards

STEPS = 12
EVALUATED: dict[str, Any] = {
    "model.n_layers": 2,
    "data.hold_out": 0.1,
    "train.total_steps": STEPS,
    "optim.adamw.lr": 0.01,
}
DILOCO = {"outer.type": "diloco", "outer.inner_steps": 4}
ALGORITHMS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "alone": ({}, [3, 6, 9, 12]),
    "alone bfloat16": ({"train.dtype": "bfloat16"}, [3, 6, 9, 12]),
    "ddp": ({"outer.type": "ddp"}, [3, 6, 9, 12]),
    "diloco": (DILOCO, [4, 8, 12]),
    "delayed": ({**DILOCO, "outer.overlap": "full"}, [4, 12]),  # two rounds arrive with the last step
    "eager": ({**DILOCO, "outer.overlap": "full", "outer.merge": "eager"}, [4, 12]),
    "eager bfloat16": (
        {**DILOCO, "outer.overlap": "full", "outer.merge": "eager", "train.dtype": "bfloat16"},
        [4, 12],
    ),
    "streaming": ({**DILOCO, "outer.fragments": 2, "outer.overlap": 1, "outer.merge": "mix"}, [4, 6, 10, 12]),
    "demo": ({"outer.type": "demo", "outer.overlap": 1}, [3, 6, 9, 12]),
    "sparseloco": ({"outer.type": "sparseloco", "outer.inner_steps": 4}, [4, 8, 12]),
}
"""Settings, and the inner steps after which evaluations are due every 3."""
BY_HAND = ("alone bfloat16", "ddp", "delayed", "eager bfloat16", "sparseloco", "streaming")
"""Those that not every day has the time for; each has its like among the others."""


@dataclass(frozen=True)
class Trained:
    """A run of one node: what it wrote down."""

    run_dir: Path
    metrics: list[dict[str, Any]]
    events: list[dict[str, Any]]

    @property
    def learned(self) -> list[tuple[Any, ...]]:
        """All that follows from the bits of its parameters."""
        names = ("step", "train/loss", "train/grad_norm", "outer/digest", "outer/weight", "train/tokens")
        return [tuple(record.get(name) for name in names) for record in self.metrics]

    @property
    def evaluated(self) -> dict[int, float]:
        """Held-out losses by the inner steps that they belong to."""
        return {record["eval/step"]: record["eval/loss"] for record in self.metrics if "eval/step" in record}


@pytest.fixture
def train(local: LocalMesh, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trained]:
    """train(**settings): a whole run of one node, in this process."""
    hold_leases_here(monkeypatch)

    def train(**settings: Any) -> Trained:
        folder = tmp_path / f"evaluating-{secrets.token_hex(4)}"
        chosen = {**EVALUATED, "run.id": folder.name, "fault.detect_s": 60, **settings}
        chosen |= {"store.url": redis_url} if "outer.type" in settings else {}
        config = config_of(folder, **chosen, **{"data.cache_dir": tmp_path / "cache"})
        with ExitStack() as stack:
            loop.train(config, local, Departure(1.0), stack)
        run_dir = folder / folder.name
        lines = {name: (run_dir / "a" / f"{name}.jsonl").read_text().splitlines() for name in ("metrics", "events")}
        return Trained(run_dir, *([json.loads(line) for line in lines[name]] for name in ("metrics", "events")))

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [pytest.param(a, marks=pytest.mark.soak if a in BY_HAND else ()) for a in ALGORITHMS]
)
def test_training_with_evaluations_is_the_one_without_to_the_last_bit(
    train: Callable[..., Trained], algorithm: str
) -> None:
    settings, steps = ALGORITHMS[algorithm]
    without, evaluating = train(**settings), train(**settings, **{"eval.every_steps": 3})
    assert evaluating.learned == without.learned and len(without.learned) == STEPS
    assert list(evaluating.evaluated) == steps
    assert len(set(evaluating.evaluated.values())) == len(evaluating.evaluated)
    assert not without.evaluated


@pytest.mark.slow
def test_evaluations_are_of_the_outer_parameters_whatever_the_node_trains_with(train: Callable[..., Trained]) -> None:
    """The state of eager and delayed rounds that stand still is the same; the nodes' own parameters are not."""
    plain = train(**DILOCO, **{"eval.every_steps": 4})
    eager = train(**ALGORITHMS["eager"][0], **{"eval.every_steps": 4})
    assert eager.evaluated[4] == plain.evaluated[4]
    at_arrival = next(record for record in eager.metrics if record.get("eval/step") == 4)
    assert at_arrival["step"] == 8  # four own inner steps later


@pytest.mark.slow
def test_what_was_evaluated_is_shown_in_metrics_events_and_status(
    train: Callable[..., Trained], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "odd.txt").write_text("zwölf Boxkämpfer " * 40)
    seen = train(**{"eval.every_steps": 6, "eval.sources": f"odd={tmp_path / 'odd.txt'}"})
    newest = seen.metrics[-1]
    names = {name for name in newest if name.startswith("eval/")}
    assert {metric_of(name) for name in names} == {name for name in METRICS if name.startswith("eval/")}
    assert newest["eval/bits_per_byte/odd"] == pytest.approx(
        newest["eval/loss/odd"] / 0.6931471805599453, rel=1e-2
    )  # of bytes; only the end of the document has none
    assert newest["train/step_s"] > 0
    told = [event for event in seen.events if event["kind"] == "evaluated"]
    assert [event["step"] for event in told] == [6, 12]
    assert told[-1]["loss"] == newest["eval/loss"]
    assert told[-1]["by_source"] == {"odd": pytest.approx(newest["eval/loss/odd"], abs=1e-6)}
    (finished,) = (event for event in seen.events if event["kind"] == "run_finished")
    assert finished["eval_loss"] == newest["eval/loss"]
    shown = render(RunReader(FolderFacts(seen.run_dir)).read())
    assert f"held out, by a at step 12: loss {newest['eval/loss']:.4f} (" in shown
    assert f"odd {newest['eval/loss/odd']:.4f} (" in shown


# -- when -----------------------------------------------------------------------------------------------------------


def due(before: int, after: int, *, is_complete: bool = False) -> bool:
    node = MagicMock(model=nn.Linear(1, 1), local=MagicMock(rank=0, world_size=1))
    evaluations = HeldOutEvaluations(node, MagicMock(), (), 10, MagicMock())
    progress = replace(Progress.at_start(), inner_step=before)
    return evaluations.is_due(progress, replace(progress, inner_step=after, is_complete=is_complete))


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(0, 9, False), (0, 10, True), (9, 13, True), (10, 13, False), (13, 45, True), (10, 10, False)],
)
def test_evaluation_is_due_at_the_first_round_end_at_or_after_each_multiple(
    before: int, after: int, expected: bool
) -> None:
    assert due(before, after) == expected


def test_evaluation_is_due_with_the_last_round() -> None:
    assert due(10, 13, is_complete=True)


def mixed(name: str, **source: Any) -> dict[str, Any]:
    return {
        "data.source": '{"type": "text"}',
        "data.sources": json.dumps([{"name": name, "weight": 1, "source": source}]),
    }


MIXED, TINY = mixed("long", type="synthetic", documents=30), mixed("tiny", type="text", paths=["{folder}/tiny.txt"])

# -- of what --------------------------------------------------------------------------------------------------------


@pytest.fixture
def evaluating(build: Build) -> Build:
    """evaluating(**settings): a node that evaluates."""
    return lambda **settings: build(**{**EVALUATED, "eval": "{}", **settings})


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in parameter_shards(model).items()}


def test_model_holds_its_own_parameters_again_after_an_evaluation_of_others(evaluating: Build) -> None:
    node = evaluating()
    layout = FlatLayout.of(node.model)
    flat, own = torch.linspace(-0.1, 0.1, layout.numel), bits(node.model)
    (one,) = open_evaluation_sets(node)
    world, events = MagicMock(outer_parameters=flat), MagicMock()
    values = HeldOutEvaluations(node, world, [one], 1, events).run(7)
    assert all(torch.equal(value, own[name]) for name, value in bits(node.model).items())
    assert node.model.training and all(p.grad is None for p in node.model.parameters())
    ShardMap(layout, 0, 1).load(parameter_shards(node.model), flat)
    batches = list(node.loader.held_out_batches(one.samples, 2))
    expected = evaluate(node.model, batches, node.tokenizer, node.local.device)
    assert (values["eval/loss"], values["eval/bits_per_byte"]) == (expected.loss, expected.bits_per_byte)
    assert values["eval/tokens"] == expected.targets == LENGTH * one.samples
    assert world.show_progress.call_count == len(batches)


def test_evaluation_that_fails_leaves_the_model_its_own_parameters() -> None:
    model = nn.Linear(2, 2)
    own = bits(model)
    places = ShardMap(FlatLayout.of(model), 0, 1, is_copy=True)

    def fail() -> None:
        with swapped_parameters(model, places.held(torch.zeros(6), dict(model.named_parameters()))):
            assert not any(value.any() for value in bits(model).values())
            raise ValueError("in it")

    with pytest.raises(ValueError, match="in it"):
        fail()
    assert all(torch.equal(value, own[name]) for name, value in bits(model).items())


def test_same_samples_are_evaluated_each_time_and_their_bytes_counted_once(evaluating: Build) -> None:
    node = evaluating()
    sets = open_evaluation_sets(node)
    evaluations = HeldOutEvaluations(node, MagicMock(outer_parameters=None), sets, 1, MagicMock())
    first, second = (dict(evaluations.run(step)) for step in (1, 2))
    for values in (first, second):
        del values["eval/took_s"], values["eval/step"]
    assert first == second and first["eval/bits_per_byte"]


def test_node_that_is_asked_to_leave_does_not_evaluate_to_the_end(evaluating: Build) -> None:
    node, events, world = evaluating(), MagicMock(), MagicMock(outer_parameters=None)
    world.show_progress.side_effect = lambda: node.departure.ask(0.0)
    assert HeldOutEvaluations(node, world, open_evaluation_sets(node), 1, events).run(1) == {}
    events.emit.assert_not_called()


def test_number_of_batches_is_of_the_batch_size_or_what_there_is(evaluating: Build, tmp_path: Path) -> None:
    (tmp_path / "short.jsonl").write_text('{"text": "' + "x" * 50 + '"}\n')
    node = evaluating(**{"eval.sources": f"short={tmp_path / 'short.jsonl'}"})
    held_out, short = open_evaluation_sets(node)
    assert (held_out.source, held_out.samples) == (None, USUAL_BATCHES * BATCH)
    assert (short.source, short.samples) == ("short", 4)  # 51 ids, of which 50 are targets
    rows = [row for batch in short.loader.held_out_batches(short.samples, 2) for row in batch.targets]
    assert sum(int((row >= 0).sum()) for row in rows) == 50
    assert isinstance(held_out, EvaluationSet)
    (exact,) = open_evaluation_sets(evaluating(**{"eval.batches": 2}))
    assert exact.samples == 2 * BATCH


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eval.batches": 1000}, r"eval.batches=1000 asks for 4000 samples .* and data.hold_out keeps back \d+; lower"),
        ({**MIXED, "eval.batches": 1000}, r"and data.hold_out keeps back of long \d+; lower"),
        ({**TINY, "data.seq_length": 2}, "keeps no sample back of .* add text to tiny of data.sources"),
        ({"eval.sources": "gone=/nowhere/*.txt"}, r"eval.sources, gone: .*no file matches '/nowhere/\*.txt'"),
        ({"eval.sources": "tiny={folder}/tiny.txt"}, "eval.sources, tiny: the corpus has 3 tokens"),
    ],
)
def test_text_that_is_not_there_is_an_error_before_the_first_step(
    evaluating: Build, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    (tmp_path / "tiny.txt").write_text("ab")
    node = evaluating(**{key: str(value).replace("{folder}", str(tmp_path)) for key, value in settings.items()})
    with pytest.raises(ConfigError, match=message):
        open_evaluation_sets(node)


def test_made_up_ids_have_a_loss_and_no_bits_per_byte(evaluating: Build) -> None:
    made_up = {"type": "synthetic-tokens", "tokens": 4000}
    node = evaluating(**{"data.source": json.dumps(made_up), "data.vocab_size": 50})
    values = HeldOutEvaluations(node, MagicMock(outer_parameters=None), open_evaluation_sets(node), 1, MagicMock())
    assert values.run(1)["eval/bits_per_byte"] is None


# -- scored payloads: the rows, and the loss on them with other parameters than the model's --------------------------

SCORED = {"data.hold_out": 0.1, "outer.type": "sparseloco", "outer.score": "{}", "store.url": "redis://host:6379"}


@pytest.fixture
def scoring(build: Build) -> Build:
    """scoring(**settings): a node that scores payloads."""
    return lambda **settings: build(**{**SCORED, **settings})


def scorer_of(node: TrainerParts) -> HeldOutScorer:
    scorer = open_scorer(node, open_evaluation_sets(node))
    assert scorer is not None
    return scorer


def test_loss_is_that_of_the_other_parameters_on_rows_of_the_lot_and_the_model_keeps_its_own(
    scoring: Build,
) -> None:
    node = scoring()
    layout, shards = FlatLayout.of(node.model), parameter_shards(node.model)
    flat, own = torch.linspace(-0.1, 0.1, layout.numel), {name: value.clone() for name, value in shards.items()}
    places, scorer = ShardMap(layout, 0, 1), scorer_of(node)
    losses = [scorer.loss(places.held(flat, shards), lot) for lot in (0, 0, 5)]
    assert all(torch.equal(shards[name], value) for name, value in own.items()) and node.model.training
    assert losses[0] == losses[1] != losses[2], "the lot draws the rows, and nothing else differs"
    places.load(shards, flat)
    expected = evaluate(node.model, node.loader.held_out_batches(4, 2), None, node.local.device)
    assert losses[0] == pytest.approx(expected.loss, abs=1e-6)


def test_rows_are_those_of_evaluation_where_none_is_held_out_and_too_few_are_an_error(
    scoring: Build, tmp_path: Path
) -> None:
    (tmp_path / "other.jsonl").write_text('{"text": "' + "x" * 400 + '"}\n')
    node = scoring(**{"data.hold_out": 0, "eval.sources": f"other={tmp_path / 'other.jsonl'}"})
    assert scorer_of(node).loss((), 3) > 0
    with pytest.raises(ConfigError, match=r"outer\.score: data\.hold_out=0\.1 keeps no sample back"):
        open_scorer(scoring(**{"data.source": '{"type": "synthetic", "documents": 1}', "data.seq_length": 311}), [])


def test_nothing_is_opened_where_nothing_is_scored(scoring: Build) -> None:
    assert open_scorer(scoring(**{"outer.score": "none"}), []) is None
