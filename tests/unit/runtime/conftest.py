"""Nodes of a small model, as the trainer builds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zeroband.config import RunConfig, load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.node.mesh import LocalMesh
from zeroband.runtime.build import TrainerParts, build_trainer

BATCH, LENGTH = 4, 16
SMALL: dict[str, Any] = {
    "model.d_model": 16,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "data.seq_length": LENGTH,
    "data.source": '{"type": "synthetic", "documents": 40}',
    "train.batch_size": BATCH,
    "train.micro_bs": 2,
    "train.dtype": "float32",
    "optim.warmup_steps": 0,
    "run.id": "run",
    "node.id": "a",
}

Build = Callable[..., TrainerParts]


def config_of(folder: Path, **settings: Any) -> RunConfig:
    """A configuration of SMALL, with these keys instead."""
    chosen = {**SMALL, "run.dir": folder, "data.cache_dir": folder / "cache", **settings}
    token = {"ZERO_BAND_RUN__TOKEN": chosen.pop("run.token")} if "run.token" in chosen else {}
    return load_config([f"--{key}={value}" for key, value in chosen.items()], token)


@pytest.fixture
def build(local: LocalMesh, tmp_path: Path) -> Iterator[Build]:
    """build(**settings): a node of SMALL, with these keys instead; closed at the end."""
    nodes: list[TrainerParts] = []

    def build(**settings: Any) -> TrainerParts:
        nodes.append(build_trainer(config_of(tmp_path, **settings), local, Departure(1.0)))
        return nodes[-1]

    yield build
    for node in nodes:
        node.loader.close()
