"""Rehearsals are what takes the time of a prediction: each one is made once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from zeroband.checks import gpu_prediction
from zeroband.checks.rehearsal import Bytes, Moment, rehearse
from zeroband.config.schema import RunConfig
from zeroband.config.training import Placement


@pytest.fixture(scope="session", autouse=True)
def rehearsals() -> Iterator[None]:
    made: dict[tuple[str, int, int, Placement], Mapping[Moment, Bytes]] = {}

    def once(config: RunConfig, vocab_size: int, *, ranks: int, placed: Placement) -> Mapping[Moment, Bytes]:
        key = config.model_dump_json(include={"model", "train", "data", "optim", "outer"}), vocab_size, ranks, placed
        if key not in made:
            made[key] = rehearse(config, vocab_size, ranks=ranks, placed=placed)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_prediction, "rehearse", once)
        yield
