from __future__ import annotations

import pytest

from zeroband.config import load_config
from zeroband.demo.story import NODES, VICTIM, Act, act_at, main, open_cluster


@pytest.mark.parametrize(
    ("step", "act"),
    [(0, Act.TOGETHER), (39, Act.TOGETHER), (40, Act.WITHOUT), (59, Act.WITHOUT), (60, Act.BACK), (120, Act.BACK)],
)
def test_act_at_changes_at_a_third_and_at_half(step: int, act: Act) -> None:
    assert act_at(step, 120) is act


def test_demo_settings_load_with_overrides_behind_them() -> None:
    cluster = open_cluster(["--train.total_steps", "77"])
    env = {**cluster.environment(NODES[0], 1), "ZERO_BAND_STORE__URL": "redis://localhost"}
    config = load_config(cluster.arguments, env)
    assert (config.train.total_steps, config.node.id, config.elastic.start_nodes) == (77, NODES[0], len(NODES))
    assert config.observe.sample_prompt
    assert VICTIM in NODES[1:]  # the first node's sample is shown


def test_main_says_what_is_wrong_with_an_override_before_it_starts_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--train.total_stepz", "77"]) == 2
    assert "total_steps" in capsys.readouterr().err


def test_main_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "configs/demo.toml" in capsys.readouterr().out
