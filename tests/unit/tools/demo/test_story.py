"""The demo's settings, its turning points and its last words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zeroband.config import load_config
from zeroband.observe.view import RunView
from zeroband.tools.demo.story import (
    NODES,
    VICTIM,
    epilogue,
    final_digests,
    has_returned,
    is_one_state,
    main,
    open_cluster,
    turning_points,
)


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


@pytest.fixture
def ended(run: RunView) -> RunView:
    """The run when node2 has come back and holds the same state."""
    back = replace(run.nodes[2], state="finished", digest=run.nodes[0].digest)
    return replace(run, nodes=(*run.nodes[:2], back, run.nodes[3]))


@pytest.fixture
def parted(run: RunView) -> RunView:
    """The run when node2 has stayed behind and node3 has never written."""
    return replace(run, nodes=run.nodes[:3])


def test_final_digests_are_those_that_the_nodes_held_at_last(ended: RunView) -> None:
    assert final_digests(ended) == dict.fromkeys(NODES, "0123456789abcdef") and is_one_state(ended)


def test_victim_that_was_in_an_earlier_round_alone_has_not_returned(ended: RunView) -> None:
    for number, is_back in ((ended.round, True), (3, False), (None, False)):
        nodes = (*ended.nodes[:2], replace(ended.nodes[2], round=number), ended.nodes[3])
        assert has_returned(replace(ended, nodes=nodes)) == is_back
    assert ended.round == 4


def test_final_digests_show_who_stayed_behind_and_who_never_wrote(parted: RunView, run: RunView) -> None:
    digests = final_digests(parted)
    assert (digests["node2"], digests["node3"]) == ("d3", None)
    assert not is_one_state(parted) and not is_one_state(run)
    assert not is_one_state(replace(run, nodes=())), "nodes without any state hold none together"


@pytest.mark.parametrize(
    "said",
    [
        "Done in 83 s.",
        "5.500 -> ",
        "sent         4 MB by all nodes; per-step data parallel would have sent 80 MB, 20 times",
        "at the end, equal on all 4 nodes",
        "node2  0123456789abcdef",
        "zeroband status {run_dir}",
        "report       {run_dir}/report.html",
        "  | def main():\n  | \n  |     pass",
        "zeroband launch",
    ],
)
def test_epilogue_says_what_was_shown(ended: RunView, said: str, tmp_path: Path) -> None:
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "sample.txt").write_text("def main():\n\n    pass\n\n")
    (tmp_path / "report.html").touch()
    assert said.format(run_dir=tmp_path) in epilogue(ended, tmp_path, took_s=83.2)


def test_epilogue_puts_no_secret_on_a_command_line(run: RunView) -> None:
    text = epilogue(run, Path("runs/demo"), took_s=83.2)
    assert "report.html" not in text
    assert (
        "zeroband store --host HOST --run-id first" in text
        and "token" not in text.rpartition("To train on several machines")[2]
    )
    assert "--run.token" not in text and "SECRET" not in text


def test_epilogue_does_not_call_different_states_equal(parted: RunView) -> None:
    text = epilogue(parted, Path("runs/demo"), took_s=83.2)
    assert "DIFFERENT" in text
    assert "node2  d3" in text
    assert "node3  none" in text
    assert "writes" not in text
