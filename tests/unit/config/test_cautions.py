"""A configuration is read as the rules of stability need it, the sections of algorithms to come among them."""

from __future__ import annotations

from typing import Any

import pytest

from zeroband.config import load_config
from zeroband.config.cautions import cautions_of, method_of, overlap_steps, round_steps, setting_of
from zeroband.config.stability import AlgorithmSetting

STORE = {"ZERO_BAND_STORE__URL": "redis://localhost"}


@pytest.mark.parametrize(
    ("outer", "method", "overlap"),
    [
        ({"type": "ddp"}, "ddp", 0),
        ({"type": "diloco", "inner_steps": 20}, "diloco", 0),
        ({"type": "diloco", "inner_steps": 20, "fragments": 1, "overlap": 0, "merge": "overwrite"}, "diloco", 0),
        ({"type": "diloco", "inner_steps": 20, "fragments": 4, "overlap": 0}, "streaming", 0),
        ({"type": "diloco", "inner_steps": 20, "fragments": 2, "overlap": 3, "merge": "mix"}, "streaming", 3),
        ({"type": "diloco", "inner_steps": 20, "overlap": "full", "merge": "overwrite"}, "delayed", 20),
        ({"type": "diloco", "inner_steps": 20, "overlap": 20, "merge": "overwrite"}, "delayed", 20),
        ({"type": "diloco", "overlap": 500}, "delayed", 500),
        ({"type": "diloco", "inner_steps": 20, "fragments": 2, "overlap": "full"}, "streaming", 10),
        ({"type": "diloco", "inner_steps": 20, "fragments": 2, "overlap": 10}, "streaming", 10),
        ({"type": "diloco", "inner_steps": 20, "overlap": "full", "merge": "eager"}, "eager", 20),
        ({"type": "diloco", "inner_seconds": 4.0, "overlap": "full", "merge": "eager"}, "eager", 0),
        ({"type": "demo", "k": 4, "overlap": 1}, "demo", 1),
        ({"type": "sparseloco", "k": 64}, "sparseloco", 0),
        ({"type": "gossip", "inner_steps": 3}, None, 0),
    ],
)
def test_method_and_overlap_are_read_off_the_section(outer: dict[str, Any], method: str | None, overlap: int) -> None:
    assert (method_of(outer), overlap_steps(outer)) == (method, overlap)


def test_length_of_a_round_is_known_unless_a_time_decides() -> None:
    rounds = [{"type": "demo"}, {"type": "diloco"}, {"type": "diloco", "inner_steps": 7}, {"type": "sparseloco"}]
    assert [round_steps(outer) for outer in rounds] == [1, 500, 7, 30]
    assert round_steps({"type": "diloco", "inner_seconds": 3.0}) is None


def test_settings_of_diloco_reach_the_rules() -> None:
    flags = ("--outer.type=diloco", "--outer.inner-steps=20", "--train.total-steps=400", "--elastic.start-nodes=4")
    config = load_config([*flags, "--outer.optimizer.lr=0.5", "--outer.optimizer.momentum=0.8"], STORE)
    expected = AlgorithmSetting("diloco", 4, 1e6, inner_steps=20, total_steps=400, lr=0.5, momentum=0.8)
    assert setting_of(config, params=1e6) == expected
    assert [caution.key for caution in cautions_of(config, params=1e6)] == ["outer.optimizer.momentum"]


@pytest.mark.parametrize("overlap", ["full", "100"])
def test_round_that_travels_until_the_next_one_is_judged_alike_however_that_is_said(overlap: str) -> None:
    flags = ("--outer.type=diloco", "--outer.inner-steps=100", "--elastic.start-nodes=4")
    worst = cautions_of(load_config([*flags, f"--outer.overlap={overlap}"], STORE))[0]
    assert worst.is_unstable and "0.7 with momentum 0.9 and 4 nodes is above 0.25" in worst.why


def test_usual_rounds_of_sparseloco_are_enough_for_a_long_run() -> None:
    flags = ("--outer.type=sparseloco", "--train.total-steps=10000")
    assert not [caution for caution in cautions_of(load_config(flags, STORE)) if "too few" in caution.why]


def test_node_alone_is_not_judged() -> None:
    assert cautions_of(load_config([], {}), params=1e6) == ()
