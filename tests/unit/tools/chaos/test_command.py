from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.tools.chaos.test_soak_report import ENOUGH

from zeroband.errors import ConfigError
from zeroband.tools.chaos import command as chaos
from zeroband.tools.chaos.command import SoakOutcome, main
from zeroband.tools.chaos.options import ChaosOptions, read_options
from zeroband.tools.chaos.plan import Kind
from zeroband.tools.chaos.soak import SoakFailed

Given = list[ChaosOptions]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Given]:
    """pretend(violations=["a violation"]): soaks end so, at once. Gives the options that they are asked for."""

    def prepare(**found: Any) -> Given:
        given: Given = []

        def soak(options: ChaosOptions, **_: object) -> SoakOutcome:
            given.append(options)
            return SoakOutcome("the report", replace(ENOUGH, **found))

        monkeypatch.setattr(chaos, "soak", soak)
        return given

    return prepare


def test_command_ends_with_0_and_leaves_the_report_where_all_held(
    pretend: Callable[..., Given], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend()
    assert main(["--report", str(tmp_path / "report.md")]) == 0
    assert (tmp_path / "report.md").read_text() == "the report"
    assert "the report" in capsys.readouterr().out


def test_command_hands_what_it_does_not_know_to_the_nodes(pretend: Callable[..., Given]) -> None:
    given = pretend()
    main(["@own.toml", "--nodes", "5", "--mtbf-s", "7", "--outer.inner-seconds", "3", "--seed", "4"])
    (options,) = given
    assert options.arguments == ("@own.toml", "--outer.inner-seconds", "3")
    assert (options.nodes, options.mtbf_s, options.seed) == (5, 7.0, 4)


def test_command_without_a_file_takes_the_preset_and_a_baseline_of_a_fifth(pretend: Callable[..., Given]) -> None:
    given = pretend()
    main(["--outer.inner-seconds", "3"])
    main(["--baseline-minutes=0.5"])
    assert given[0].arguments[0].endswith("configs/chaos.toml")
    assert [options.calm_minutes for options in given] == [2.0, 0.5]


def test_soak_reads_the_folder_that_its_flags_name_for_the_nodes(
    pretend: Callable[..., Given], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZERO_BAND_RUN__DIR", "of-the-environment")
    given = pretend()
    main(["--run.dir", "of-a-flag", "--run.id=mine"])
    main([])
    assert [options.directory for options in given] == [Path("of-a-flag"), Path("of-the-environment")]
    assert given[0].run_id == "mine"


@pytest.mark.parametrize(
    ("found", "code", "said"),
    [
        ({"violations": ["round 4: digest differs"]}, 1, "VIOLATION: round 4: digest differs"),
        ({"struck": 0}, 3, "NO EVIDENCE: none of"),
        ({"starved": ["node1 finished no round"]}, 3, "STARVED: node1 finished no round"),
        ({"violations": ["differs"], "struck": 0, "starved": ["node1"]}, 1, "VIOLATION: differs"),
        ({"is_interrupted": True}, 3, ""),
    ],
)
def test_soak_that_shows_nothing_fails_and_is_told_from_one_that_broke(
    pretend: Callable[..., Given], capsys: pytest.CaptureFixture[str], found: dict[str, Any], code: int, said: str
) -> None:
    pretend(**found)
    assert main([]) == code
    assert said in capsys.readouterr().err
    assert "held" not in replace(ENOUGH, **found).headline


WRONG = [
    (["--nodes", "1"], "--nodes=1"),
    (["--nodes", "2", "--keep-undisturbed", "3"], "--keep-undisturbed=3"),
    (["--stores", "0"], "--stores=0 must be 1 or more"),
    (["--nodes", "3", "--dial-out-only", "3"], "--dial-out-only=3 must be 0 or more, and fewer than --nodes=3"),
    (["--kinds", "store dead"], "--kinds: no kind of fault is called 'store dead'; there are: machine killed, "),
    (["--kinds", "cut off,store lost"], "--kinds: store lost cannot happen with --stores=1 --dial-out-only=0"),
    (["--stores", "2", "--kinds", "store paused"], "store paused, store restarted, store emptied need --stores=1"),
    (["--dial-out-only", "1", "--kinds", "relay killed"], "relay killed needs --dial-out-only=2 or more"),
    (["--dial-out-only", "1", "--comm.backend", "gloo"], 'node.dial_out_only=True needs comm.backend = "native"'),
    (["--keep-undisturbed", "0"], "--keep-undisturbed=0, which must be 1 or more"),
    (["--mtbf-s", "0"], "--mtbf-s=0"),
    (["--minutes", "-1"], "--minutes=-1"),
    (["--minutes", "nan"], "--minutes=nan"),
    (["--baseline-minutes", "0"], "--baseline-minutes=0"),
    (["--minutes", "0.01", "--mtbf-s", "1e9"], "no fault falls within --minutes=0.01"),
    (["@configs/debug/diloco.toml"], "train.total_steps=50: the run could be complete before"),
    (["--store.url", "redis://elsewhere:1"], "store.url: zeroband chaos sets it"),
    (["--node.id", "same"], "node.id: zeroband chaos sets it"),
    (["--node.shm-dir", "/tmp"], "node.shm_dir: zeroband chaos sets it"),
]


@pytest.mark.parametrize(("wrong", "why"), WRONG)
def test_command_refuses_what_makes_no_soak_before_anything_starts(
    wrong: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(chaos.LocalCluster, "start", lambda *_, **__: pytest.fail("a node was started"))
    assert main([*wrong, "--run.dir", str(tmp_path)]) == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.glob("*/node*"))


def test_way_out_of_a_run_that_would_end_is_one_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_: object, **__: object) -> None:
        raise SoakFailed("a node was started")

    monkeypatch.setattr(chaos.LocalCluster, "start", started)
    asked = ["@configs/debug/diloco.toml", "--run.dir", str(tmp_path)]
    assert main(asked) == 2
    (advised,) = re.findall(r"--train\.total-steps=\d+", capsys.readouterr().err)
    assert main([*asked, advised]) == 3
    assert "a node was started" in capsys.readouterr().err


def test_command_refuses_a_folder_that_holds_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / "node0").mkdir(parents=True)
    assert main(["--run.dir", str(tmp_path), "--run.id", "mine"]) == 2
    assert "already contains a run" in capsys.readouterr().err


def test_command_refuses_a_run_without_an_outer_algorithm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        chaos.soak(ChaosOptions(("--outer", "none"), nodes=3, directory=tmp_path), say=lambda line: None)


@pytest.mark.parametrize(("nodes", "stores", "keep"), [(7, 1, 2), (7, 2, 4), (8, 2, 5), (2, 2, 2), (5, 0, 3)])
def test_soak_of_several_stores_leaves_more_than_half_of_the_nodes_in_peace(nodes: int, stores: int, keep: int) -> None:
    assert ChaosOptions((), nodes=nodes, stores=stores).min_undisturbed == keep


@pytest.mark.parametrize(
    "flags",
    [
        ["@a b.toml", "--nodes", "7", "--seed=3", "--minutes", "0.5", "--fault.detect-s", "3"],
        ["--nodes=7", "--stores=2", "--dial-out-only=2", "--kinds=store lost, relay killed"],
        ["--stores=nodes", "--kinds=holder killed", "--shared-host"],
    ],
)
def test_report_names_a_command_that_makes_the_same_soak(flags: list[str]) -> None:
    asked, _ = read_options(flags)
    again, _ = read_options(shlex.split(asked.command)[2:])
    assert replace(again, run_id="", baseline_minutes=None) == replace(asked, run_id="", baseline_minutes=None)


def test_options_are_those_of_the_flags() -> None:
    plain, _ = read_options(["@a b.toml", "--nodes", "7", "--seed=3", "--fault.detect-s", "3"])
    assert (plain.arguments, plain.nodes, plain.seed) == (("@a b.toml", "--fault.detect-s", "3"), 7, 3)
    several, _ = read_options(["--nodes=7", "--stores=2", "--dial-out-only=2", "--kinds=store lost, relay killed"])
    assert several.kinds == several.wanted_kinds == (Kind.STORE_LOST, Kind.RELAY_KILLED)
    assert (several.stores, several.dial_out_only, several.dial_out_only_nodes) == (2, 2, ("node5", "node6"))
    held, _ = read_options(["--stores=nodes", "--kinds=holder killed", "--shared-host"])
    assert (held.stores, held.kinds, held.is_host_shared) == (0, (Kind.HOLDER_KILLED,), True)
