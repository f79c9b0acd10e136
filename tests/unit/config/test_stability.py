"""The rules of stability against the published and derived limits, and what they read off a configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter
from tests.unit.config.conftest import STORE

from zeroband.config import load_config
from zeroband.config.outer import Outer
from zeroband.config.stability import (
    AlgorithmSetting,
    cautions,
    cautions_of,
    largest_stable_lr,
    method_of,
    overlap_steps,
    safe_lr,
    setting_of,
)


@pytest.mark.parametrize(
    ("momentum", "sync", "eager", "delayed"),
    [
        (0.9, 1.36, (0.77, 0.42, 0.32, 0.28), 0.25),
        (0.8, 1.38, (0.87, 0.51, 0.41, 0.38), 0.34),
        (0.5, 1.50, (1.19, 0.76, 0.65, 0.60), 0.56),
        (0.0, 2.00, (2.00, 1.33, 1.14, 1.07), 1.00),
    ],
)
def test_limits_are_those_of_the_table(momentum: float, sync: float, eager: tuple[float, ...], delayed: float) -> None:
    assert largest_stable_lr("diloco", 4, momentum) == pytest.approx(sync, abs=0.01)
    got = [largest_stable_lr("eager", nodes, momentum) for nodes in (2, 4, 8, 16)]
    assert got == pytest.approx(list(eager), abs=0.01)
    assert largest_stable_lr("delayed", 4, momentum) == pytest.approx(delayed, abs=0.01)


def test_eager_update_of_one_node_has_the_limit_of_diloco() -> None:
    assert largest_stable_lr("eager", 1, 0.9) == largest_stable_lr("diloco", 1, 0.9)


def test_safe_learning_rates_of_eager_updates_are_half_of_the_limit() -> None:
    assert [safe_lr("eager", nodes, 0.9) for nodes in (2, 4, 8)] == [0.38, 0.21, 0.16]


def test_published_settings_raise_no_alarm() -> None:
    quiet = [
        AlgorithmSetting("diloco", 8, params=150e6, inner_steps=500, total_steps=88_000, lr=0.7),
        AlgorithmSetting("streaming", 2, params=1e9, inner_steps=30, lr=0.4, overlap=5),
        AlgorithmSetting("eager", 2, params=1e9, inner_steps=30, lr=0.4),
        AlgorithmSetting("demo", 16, params=1.2e9),
        AlgorithmSetting("sparseloco", 20, params=72e9, inner_steps=30, total_steps=100_000, lr=1.0, density=64 / 4096),
        AlgorithmSetting("ddp", 8, params=1e6),
    ]
    assert [cautions(setting) for setting in quiet] == [()] * len(quiet)


@pytest.mark.parametrize(
    ("setting", "key", "way_out"),
    [
        (AlgorithmSetting("eager", 8, lr=0.7), "outer.optimizer.lr", "0.16 or below"),
        (AlgorithmSetting("delayed", 2, lr=0.4), "outer.optimizer.lr", "0.13 or below"),
        (AlgorithmSetting("diloco", 2, lr=1.5), "outer.optimizer.lr", "0.7 or below"),
        (AlgorithmSetting("streaming", 2, lr=0.4, alpha=1.0), "outer.alpha", "0.5"),
        (AlgorithmSetting("sparseloco", 4, lr=1.0, decay=0.0), "outer.decay", "0.95"),
    ],
)
def test_what_diverges_is_called_unstable_with_a_way_out(setting: AlgorithmSetting, key: str, way_out: str) -> None:
    first = cautions(setting)[0]
    assert (first.key, first.is_unstable) == (key, True)
    assert way_out in str(first)


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        (AlgorithmSetting("eager", 2, lr=0.6), "within a quarter of the limit"),
        (AlgorithmSetting("diloco", 2, inner_steps=2000), "2000 was never tried"),
        (AlgorithmSetting("diloco", 2, inner_steps=20, total_steps=1200), "60 rounds are few for an outer gain"),
        (
            AlgorithmSetting("sparseloco", 2, lr=1.0, inner_steps=30, total_steps=3000),
            "100 rounds are too few to drain",
        ),
        (AlgorithmSetting("diloco", 8, params=35e6), "DiLoCo loses about 4 %"),
        (AlgorithmSetting("demo", 8, params=150e6), "50M and 300M"),
        (AlgorithmSetting("demo", 8, params=600e6), "DisTrO's did below 1.2B"),
        (AlgorithmSetting("demo", 100, params=2e9), "downloads 99 payloads"),
        (AlgorithmSetting("eager", 2, params=35e6, lr=0.3), "eager updates lose about 3 %"),
        (AlgorithmSetting("eager", 4, lr=0.2), "the paper has two"),
        (AlgorithmSetting("streaming", 2, lr=0.4, overlap=11), "up to 5 are recommended"),
        (AlgorithmSetting("delayed", 2, lr=0.1), "naively delayed"),
        (AlgorithmSetting("sparseloco", 4, lr=1.0, density=0.3), "30 % of the values"),
    ],
)
def test_what_loses_quality_is_said(setting: AlgorithmSetting, why: str) -> None:
    (caution,) = cautions(setting)
    assert not caution.is_unstable
    assert why in caution.why


def test_limit_of_streaming_is_that_of_its_outer_optimizer() -> None:
    quiet = AlgorithmSetting("streaming", 2, lr=1.3, overlap=1)
    assert cautions(quiet) == ()
    assert cautions(replace(quiet, lr=1.4))[0].is_unstable


# -- what the rules look at, read off a configuration -----------------------------------------------------------------


def section_of(values: dict[str, Any]) -> Outer:
    return TypeAdapter[Outer](Outer).validate_python(values)


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
        ({"type": "custom", "algorithm": "own.py", "inner_steps": 3}, None, 0),
    ],
)
def test_method_and_overlap_are_read_off_the_section(outer: dict[str, Any], method: str | None, overlap: int) -> None:
    section = section_of(outer)
    assert (method_of(section), overlap_steps(section)) == (method, overlap)


def test_length_of_a_round_is_known_unless_a_time_decides() -> None:
    rounds = [{"type": "demo"}, {"type": "diloco"}, {"type": "diloco", "inner_steps": 7}, {"type": "sparseloco"}]
    assert [section_of(outer).round_steps for outer in rounds] == [1, 500, 7, 30]
    assert section_of({"type": "diloco", "inner_seconds": 3.0}).round_steps is None


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
