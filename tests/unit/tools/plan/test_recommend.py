"""Recommended settings: a configuration that loads, reaches the target, and has no shorter phase that does."""

from __future__ import annotations

import random
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from zeroband import cli
from zeroband.config.load import load_config
from zeroband.config.outer import DilocoConfig
from zeroband.config.stability import method_of
from zeroband.errors import ConfigError
from zeroband.tools.plan.forecast import Job, Link, forecast_of
from zeroband.tools.plan.recommend import LEAST_STEPS, MOST_STEPS, SHORT_STEPS, Recommendation, recommend

JOB = Job(params=1e9, nodes=8, step_s=2.0)


def link_of(mbit: float) -> Link:
    return Link(mbit * 1e6 / 8, mbit * 1e6 / 8, rtt_s=0.1)


def values(found: Recommendation) -> dict[str, str]:
    return {setting.key: setting.value for setting in found.settings}


def loads(found: Recommendation, folder: Path) -> DilocoConfig:
    """The [outer] section of a run with these settings."""
    path = folder / "next.toml"
    path.write_text(found.to_toml(), encoding="utf-8")
    outer = load_config([f"@{path}", "--store.url", "nodes", "--store.peers", "a"], {}).outer
    assert isinstance(outer, DilocoConfig)
    return outer


def test_any_recommendation_is_a_configuration_with_the_shortest_phase_that_will_do(tmp_path: Path) -> None:
    chance, reached, missed, kinds = random.Random(0), 0, 0, set[str]()
    for _ in range(120):
        job = replace(
            JOB,
            params=10 ** chance.uniform(7, 10.5),
            nodes=chance.randint(2, 64),
            step_s=10 ** chance.uniform(-0.5, 1.5),
        )
        link, target = link_of(10 ** chance.uniform(0, 4)), chance.uniform(0.6, 0.99)
        found = recommend(job, link, target)
        outer = loads(found, tmp_path)
        method = method_of(outer)
        assert method is not None
        kinds.add(method)
        settings = replace(job, fragments=outer.fragments, overlap=outer.overlap_steps or 0)
        steps, codec = found.forecast.round_steps, values(found)["comm.codec"].strip('"')
        assert steps == outer.inner_steps
        # a method of the planner hides as much as these settings do
        said = forecast_of(replace(settings, inner_steps=steps), link, found.forecast.method, codec)
        assert said.compute_utilisation == found.forecast.compute_utilisation
        assert found.reaches_target == (said.compute_utilisation >= target)
        reached, missed = reached + found.reaches_target, missed + (not found.reaches_target)
        if not found.reaches_target:
            assert steps == MOST_STEPS
        elif steps > max(LEAST_STEPS + outer.fragments, outer.fragments * ((outer.overlap_steps or 0) + 1)):
            shorter = replace(settings, inner_steps=steps - outer.fragments)
            assert forecast_of(shorter, link, found.forecast.method, codec).compute_utilisation < target
    assert reached > 20
    assert missed > 5
    assert kinds == {"diloco", "streaming", "eager"}


def test_fast_links_wait_for_rounds_and_slow_ones_overlap_them() -> None:
    assert values(recommend(JOB, link_of(10_000), 0.95)) | {"outer.inner_steps": ""} == {
        "outer.type": '"diloco"',
        "outer.inner_steps": "",
        "outer.fragments": "1",
        "outer.overlap": "0",
        "outer.straggler_grace": "0.1",
        "outer.optimizer.lr": "0.7",
        "comm.codec": '"int8"',
    }
    slow = values(recommend(JOB, link_of(100), 0.95))
    assert (slow["outer.fragments"], slow["outer.overlap"], slow["comm.codec"]) == ("4", "5", '"int4"')
    slowest = recommend(JOB, link_of(5), 0.95)
    assert values(slowest)["outer.merge"] == '"eager"'
    assert not slowest.reaches_target
    assert "the links would have to be" in slowest.to_toml()


def test_short_phases_are_preferred_to_fewer_mechanisms() -> None:
    waits, streams = recommend(JOB, link_of(10_000), 0.95), recommend(JOB, link_of(1_000), 0.95)
    assert waits.forecast.round_steps <= SHORT_STEPS
    assert streams.forecast.round_steps <= SHORT_STEPS
    assert streams.forecast.method == "streaming"


def test_nodes_of_several_paces_have_phases_by_time(tmp_path: Path) -> None:
    found = recommend(replace(JOB, slowest_step_s=3.0), link_of(1_000), 0.95)
    outer = loads(found, tmp_path)
    assert outer.inner_steps is None
    assert outer.inner_seconds == pytest.approx(found.forecast.round_steps * 2.0, rel=0.01)
    assert "slower nodes make fewer steps" in found.to_toml()


def test_one_node_has_no_rounds_to_set() -> None:
    with pytest.raises(ConfigError, match="--nodes 2 or more"):
        recommend(replace(JOB, nodes=1), link_of(100), 0.95)


def test_the_command_prints_toml_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--params", "1e9", "--nodes", "8", "--up", "1gbit", "--step-s", "2", "--recommend"]
    assert cli.main(["plan", *arguments]) == 0
    printed = tomllib.loads(capsys.readouterr().out)
    assert printed["outer"]["type"] == "diloco"
    assert printed["comm"] == {"codec": "int8"}
