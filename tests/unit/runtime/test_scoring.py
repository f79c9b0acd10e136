"""The rows by which payloads are scored, and the loss on them with other parameters than the model's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroband.config import load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import ConfigError
from zeroband.export.evaluation import evaluate
from zeroband.node.mesh import LocalMesh
from zeroband.runtime.build import TrainerParts, build_trainer
from zeroband.runtime.evaluation import open_evaluation_sets
from zeroband.runtime.scoring import HeldOutScorer, open_scorer
from zeroband.state.flat import FlatLayout, ShardMap, parameter_shards

SMALL: dict[str, Any] = {
    "model.d_model": 16,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "data.seq_length": 16,
    "data.source": '{"type": "synthetic", "documents": 40}',
    "data.hold_out": 0.1,
    "train.batch_size": 4,
    "train.micro_bs": 2,
    "train.dtype": "float32",
    "run.id": "run",
    "node.id": "a",
    "outer.type": "sparseloco",
    "outer.score": "{}",
    "store.url": "redis://host:6379",
}


@pytest.fixture
def build(local: LocalMesh, tmp_path: Path) -> Iterator[Callable[..., TrainerParts]]:
    """build(**settings): a node that scores payloads."""
    nodes: list[TrainerParts] = []

    def build(**settings: Any) -> TrainerParts:
        chosen = {**SMALL, "run.dir": tmp_path, "data.cache_dir": tmp_path / "cache", **settings}
        config = load_config([f"--{key}={value}" for key, value in chosen.items()], {})
        nodes.append(build_trainer(config, local, Departure(1.0)))
        return nodes[-1]

    yield build
    for node in nodes:
        node.loader.close()


def scorer_of(node: TrainerParts) -> HeldOutScorer:
    scorer = open_scorer(node, open_evaluation_sets(node))
    assert scorer is not None
    return scorer


def test_loss_is_that_of_the_other_parameters_on_rows_of_the_lot_and_the_model_keeps_its_own(
    build: Callable[..., TrainerParts],
) -> None:
    node = build()
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
    build: Callable[..., TrainerParts], tmp_path: Path
) -> None:
    (tmp_path / "other.jsonl").write_text('{"text": "' + "x" * 400 + '"}\n')
    node = build(**{"data.hold_out": 0, "eval.sources": f"other={tmp_path / 'other.jsonl'}"})
    assert scorer_of(node).loss((), 3) > 0
    with pytest.raises(ConfigError, match=r"outer\.score: data\.hold_out=0\.1 keeps no sample back"):
        open_scorer(build(**{"data.source": '{"type": "synthetic", "documents": 1}', "data.seq_length": 311}), [])


def test_nothing_is_opened_where_nothing_is_scored(build: Callable[..., TrainerParts]) -> None:
    assert open_scorer(build(**{"outer.score": "none"}), []) is None
