from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from zeroband.config import RunConfig, load_config
from zeroband.config.schema import RunSection
from zeroband.errors import ConfigError
from zeroband.node.run_names import ADJECTIVES, AUTO, NOUNS, named, new_run_name

STORE = {"ZERO_BAND_STORE__URL": "redis://localhost"}


def _draws(*values: float) -> Iterator[float]:
    yield from values
    yield from repeat(values[-1])


def test_a_name_is_a_day_and_two_words_that_are_a_run_id(tmp_path: Path) -> None:
    name = new_run_name(tmp_path, now_s=1795491752.0, draw=lambda: 0.3)
    assert re.fullmatch(r"2026-11-24-[a-z]+-[a-z]+", name)
    assert RunSection(id=name).id == name


def test_words_are_short_plain_and_there_once() -> None:
    words = [*ADJECTIVES, *NOUNS]
    assert len(ADJECTIVES) >= 80 and len(NOUNS) >= 80
    assert all(re.fullmatch(r"[a-z]{3,9}", word) for word in words)
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 0.999999])
def test_a_name_that_is_taken_is_not_given_again(tmp_path: Path, drawn: float) -> None:
    names: set[str] = set()
    for _ in range(5):
        name = new_run_name(tmp_path, now_s=0.0, draw=lambda: drawn)
        (tmp_path / name).mkdir()
        names.add(name)
    assert len(names) == 5


def test_names_of_a_folder_that_is_not_there_are_drawn_from_all_words(tmp_path: Path) -> None:
    draws = _draws(0.0, 0.999999)
    first, last = (new_run_name(tmp_path / "none", now_s=0.0, draw=lambda: next(draws)) for _ in range(2))
    assert first == f"1970-01-01-{ADJECTIVES[0]}-{NOUNS[0]}"
    assert last == f"1970-01-01-{ADJECTIVES[-1]}-{NOUNS[-1]}"


def test_a_run_with_a_name_keeps_it() -> None:
    config = RunConfig()
    assert named(config, is_only_process=False) is config
    assert config.run.id == "default"  # the same command goes on with the same run


def test_auto_names_a_run_that_begins_with_the_checkpoint_of_another(tmp_path: Path) -> None:
    flags = ["--run.id", AUTO, "--run.dir", str(tmp_path), "--ckpt.path", "new", "--resume.path", "old/other"]
    assert named(load_config(["@debug/normal", *flags], {}), is_only_process=True).run.id != AUTO


def test_auto_names_a_run_of_one_process_and_its_founder(tmp_path: Path) -> None:
    for preset, environ in (("debug/normal", {}), ("debug/diloco", STORE)):
        asked = load_config([f"@{preset}", "--run.id", AUTO, "--run.dir", str(tmp_path)], environ)
        config = named(asked, is_only_process=True)
        assert config.run.id.startswith("2") and config.run.id != AUTO
        assert config.model_copy(update={"run": asked.run}) == asked


@pytest.mark.parametrize(
    ("arguments", "is_only_process", "words"),
    [
        (["@debug/normal"], False, "start them by zeroband launch"),
        (["@debug/diloco", "--elastic.start_nodes", "2"], True, "waits for 2 nodes"),
        (["@debug/normal", "--ckpt.path", "checkpoints", "--resume"], True, "no checkpoints to resume"),
    ],
)
def test_auto_is_refused_where_others_or_the_next_start_would_have_to_come_to_the_same_name(
    arguments: list[str], is_only_process: bool, words: str
) -> None:
    config = load_config([*arguments, "--run.id", AUTO], STORE if "diloco" in arguments[0] else {})
    with pytest.raises(ConfigError, match=words):
        named(config, is_only_process=is_only_process)
