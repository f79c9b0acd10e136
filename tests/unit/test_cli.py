"""The `zeroband` command hands over to the part that does the work."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.made_runs import event

from zeroband import __version__, cli
from zeroband.observe.events import EVENTS_FILE


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("train", "zeroband.train"),
        ("simulate", "zeroband.tools.cluster.simulate"),
        ("demo", "zeroband.tools.demo.story"),
        ("status", "zeroband.tools.status"),
        ("export", "zeroband.tools.offline.export"),
        ("eval", "zeroband.tools.offline.evaluate"),
        ("sample", "zeroband.tools.offline.sample"),
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
    assert cli.main(["config", "--run.seed", "41"]) == 0
    out = capsys.readouterr().out
    assert "seed = 41" in out and "# caution" not in out


def test_config_says_what_is_known_to_go_wrong_in_comments(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--outer.type=diloco", "--outer.optimizer.lr=1.5", "--store.url=redis://localhost"]
    assert cli.main(["config", *asked]) == 0
    out = capsys.readouterr().out
    assert out.startswith("# caution: outer.optimizer.lr: 1.5 with momentum 0.9 and 1 nodes is above 1.36")
    assert tomllib.loads(out)["outer"]["optimizer"]["lr"] == 1.5


def test_config_says_what_is_wrong_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "--run.sed", "41"]) == 2
    assert capsys.readouterr().err == "zeroband config: unknown key run.sed (from --run.sed): did you mean run.seed?\n"


def test_command_itself_loads_none_of_its_parts() -> None:
    probe = "import sys, zeroband.cli; print({'numpy', 'pydantic', 'torch'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


@pytest.mark.parametrize("argv", [[], ["trian"]])
def test_missing_or_unknown_command_is_a_usage_error(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.slow
def test_command_whose_reader_has_gone_ends_without_a_traceback(tmp_path: Path) -> None:
    events = tmp_path / "run" / "a" / EVENTS_FILE
    events.parent.mkdir(parents=True)

    def happens(epoch: int) -> None:
        with events.open("a") as file:
            file.write(json.dumps(event("a", epoch, "epoch_changed", epoch=epoch, members=["a#1"]).record) + "\n")

    happens(0)
    program = f"import sys; from zeroband.cli import main; sys.exit(main(['top', {str(tmp_path / 'run')!r}]))"
    top = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert top.stdout is not None and top.stderr is not None
    assert top.stdout.readline()
    top.stdout.close()
    for epoch in itertools.count(1):
        happens(epoch)
        with suppress(subprocess.TimeoutExpired):
            top.wait(0.2)
            break
    assert (top.returncode, top.stderr.read()) == (128 + signal.SIGPIPE, "")


def test_pipe_that_breaks_elsewhere_is_no_reader_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def main(argv: Sequence[str]) -> int:
        raise BrokenPipeError("a socket")

    monkeypatch.setitem(sys.modules, "zeroband.train", SimpleNamespace(main=main))
    with pytest.raises(BrokenPipeError, match="a socket"):
        cli.main(["train"])


@pytest.mark.parametrize(("flag", "shown"), [("--help", "simulate"), ("--version", __version__)])
def test_help_and_version_end_well(flag: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([flag])
    assert ended.value.code == 0
    assert shown in capsys.readouterr().out
