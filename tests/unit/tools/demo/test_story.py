from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.config import load_config
from zeroband.tools.demo.story import NODES, VICTIM, main, open_cluster, turning_points


def test_turning_points_are_at_about_a_third_and_half_and_leave_time_to_come_back() -> None:
    kill_step, restart_step = turning_points(1000)
    assert 250 <= kill_step <= 350 < 400 <= restart_step <= 500


def test_demo_settings_load_with_overrides_behind_them() -> None:
    cluster = open_cluster(["--train.total_steps", "77"])
    env = {**cluster.environment(NODES[0], 1), "ZERO_BAND_STORE__URL": "redis://localhost"}
    config = load_config(cluster.arguments, env)
    assert (config.train.total_steps, config.node.id, config.elastic.start_nodes) == (77, NODES[0], len(NODES))
    assert config.observe.sample_prompt
    assert VICTIM in NODES[1:]  # the first node's sample is shown


def test_demo_looks_where_the_nodes_of_its_overrides_write() -> None:
    cluster = open_cluster(["--run.id", "mine", "--run.dir", "elsewhere"])
    assert cluster.run_dir == Path("elsewhere/mine").absolute()


def test_main_says_what_is_wrong_with_an_override_before_it_starts_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--train.total_stepz", "77"]) == 2
    assert "total_steps" in capsys.readouterr().err


def test_main_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "configs/demo.toml" in capsys.readouterr().out
