"""The rows by which payloads are scored, and the loss on them with other parameters than the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.runtime.conftest import Build

from zeroband.errors import ConfigError
from zeroband.export.evaluation import evaluate
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.evaluation import HeldOutScorer, open_evaluation_sets, open_scorer
from zeroband.state.flat import FlatLayout, ShardMap, parameter_shards

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
