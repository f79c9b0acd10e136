from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zeroband.chaos import command as chaos
from zeroband.chaos.command import ChaosOptions, Outcome, main
from zeroband.errors import ConfigError

Given = list[ChaosOptions]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Given]:
    """pretend("a violation"): soaks end so, at once. Gives the options that they are asked for."""

    def prepare(*violations: str) -> Given:
        given: Given = []

        def soak(options: ChaosOptions, **_: object) -> Outcome:
            given.append(options)
            return Outcome("the report", violations, tmp_path)

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


def test_command_ends_with_1_after_a_violation(pretend: Callable[..., Given]) -> None:
    pretend("round 4: digest differs")
    assert main([]) == 1


def test_command_hands_what_it_does_not_know_to_the_nodes(pretend: Callable[..., Given]) -> None:
    given = pretend()
    main(["@own.toml", "--nodes", "5", "--mtbf-s", "7", "--outer.inner-seconds", "3", "--seed", "4"])
    (options,) = given
    assert options.arguments == ("@own.toml", "--outer.inner-seconds", "3")
    assert (options.nodes, options.mtbf_s, options.seed) == (5, 7.0, 4)


def test_command_without_a_file_takes_the_preset(pretend: Callable[..., Given]) -> None:
    given = pretend()
    main(["--outer.inner-seconds", "3"])
    assert given[0].arguments[0].endswith("configs/chaos.toml")


def test_baseline_is_a_fifth_of_the_soak_unless_it_is_given() -> None:
    assert ChaosOptions((), minutes=10.0).calm_minutes == 2.0
    assert ChaosOptions((), minutes=10.0, baseline_minutes=0.5).calm_minutes == 0.5


@pytest.mark.parametrize("wrong", [["--nodes", "1"], ["--mtbf-s", "0"], ["--minutes", "-1"]])
def test_command_refuses_options_that_make_no_soak(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrong) == 2
    assert "--keep-undisturbed" in capsys.readouterr().err


def test_command_refuses_a_run_without_an_outer_algorithm(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        chaos.soak(ChaosOptions(("--outer", "none"), nodes=3, directory=tmp_path), say=lambda line: None)
