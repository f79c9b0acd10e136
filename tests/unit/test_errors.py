"""What users of an installed package are told to type."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

import zeroband

SOURCE = Path(zeroband.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"


def test_messages_speak_of_uv_in_a_clone_in_one_place_alone() -> None:
    says_so = {path.name for path in SOURCE.rglob("*.py") if "uv sync" in path.read_text(encoding="utf-8")}
    assert says_so == {"errors.py"}
    runs = {path.name for path in SOURCE.rglob("*.py") if "uv run" in path.read_text(encoding="utf-8")}
    assert runs <= {"story.py"}  # the demo runs in a clone


def test_nobody_is_told_to_install_another_library_of_our_name() -> None:
    for path in SOURCE.rglob("*.py"):
        assert "pip install zeroband" not in path.read_text(encoding="utf-8").replace("zeroband-elastic", ""), path


def test_example_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.chdir(os.sep)
    with pytest.raises(SystemExit, match=r"needs transformers: .*pip install \'zeroband-elastic\[hf\]\'"):
        runpy.run_path(str(EXAMPLES / "hugging_face.py"))
