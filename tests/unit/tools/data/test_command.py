from __future__ import annotations

import io
import itertools
from pathlib import Path

import pytest

from zeroband.tools.data.command import main
from zeroband.tools.data.progress import Shown


def test_error_of_an_action_ends_with_2_and_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("zeroband data inspect: ")
    with pytest.raises(SystemExit, match="2"):
        main(["nosuch"])


def test_each_action_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("prepare", "inspect", "audit"):
        with pytest.raises(SystemExit, match="0"):
            main([action, "--help"])
        assert f"zeroband data {action}" in capsys.readouterr().out


def test_progress_counts_what_was_finished_before_but_not_its_speed() -> None:
    clock = itertools.count(0, 5.0)
    now = [next(clock)]
    said = io.StringIO()
    shown = Shown("tokens", total=1000, done=500, stream=said, now=lambda: now[0])
    with shown.block:
        now[0] = next(clock)
        shown.advance(100, 50)
        assert (said.getvalue(), shown.share, shown.tokens_per_s) == ("", 0.6, 10.0)
        now[0] = next(clock)
        shown.advance(100, 50)
        shown.finish(250)
    assert said.getvalue() == "tokens: 70%, 100 tokens, 10/s, 15 s left\n"
    assert shown.share == 0.75
