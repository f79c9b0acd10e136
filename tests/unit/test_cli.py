"""The `zeroband` command hands over to the part that does the work."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from zeroband import __version__, cli


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("train", "zeroband.train"),
        ("simulate", "zeroband.cluster"),
        ("demo", "zeroband.demo"),
        ("status", "zeroband.observe.status"),
        ("export", "zeroband.offline.export"),
        ("eval", "zeroband.offline.evaluate"),
        ("sample", "zeroband.offline.sample"),
    ],
)
def test_command_hands_all_that_follows_it_to_its_part(
    monkeypatch: pytest.MonkeyPatch, command: str, module: str
) -> None:
    seen: list[str] = []
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(main=lambda argv: seen.extend(argv) or 7))
    assert cli.main([command, "@a.toml", "--help", "x"]) == 7
    assert seen == ["@a.toml", "--help", "x"]


def test_config_prints_the_resolved_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["config", "--run.seed", "41"])
    assert ended.value.code == 0
    assert "seed = 41" in capsys.readouterr().out


def test_config_says_what_is_wrong_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--run.sed", "41"]) == 2
    assert capsys.readouterr().err == "zeroband: unknown key run.sed (from --run.sed): did you mean run.seed?\n"


@pytest.mark.parametrize("argv", [[], ["trian"]])
def test_missing_or_unknown_command_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "shown"), [("--help", "simulate"), ("--version", __version__)])
def test_help_and_version_end_well(flag: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([flag])
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out
