from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.tools.data.command import main


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
