from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from zeroband.config import load_config
from zeroband.config.schema import RunSection
from zeroband.errors import ConfigError
from zeroband.node.names import ADJECTIVES, AUTO, NOUNS, named, new_run_name

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


@pytest.mark.parametrize("is_only_process", [True, False])
def test_a_run_with_a_name_keeps_it(is_only_process: bool) -> None:
    config = load_config(["@debug/normal", "--run.id", "default"], {})
    assert named(config, is_only_process=is_only_process) is config


def test_a_run_of_one_node_is_named_and_nodes_of_several_have_one_address(tmp_path: Path) -> None:
    one = load_config(["@debug/normal", f"--run.dir={tmp_path}"], {})
    assert re.fullmatch(r"2\d{3}-\d\d-\d\d-[a-z]+-[a-z]+", named(one, is_only_process=True).run.id)
    several = load_config(["@debug/diloco"], STORE)
    assert named(several, is_only_process=True) is several and several.run.id == "default"


SAYS_ITS_NAME = """
from zeroband.config import load_config
from zeroband.node.names import named
print(named(load_config(["@debug/normal"], {}), is_only_process=False).run.id, flush=True)
"""
LAUNCHER = """
import subprocess, sys
for _ in range(2):
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""


def test_ranks_of_one_launcher_find_one_name_and_those_of_another_one_another(tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if not key.startswith("ZERO_BAND_")}
    command = [sys.executable, "-c", LAUNCHER, SAYS_ITS_NAME]
    launchers = [subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (launcher.communicate(timeout=60)[0].split() for launcher in launchers)
    assert len(first) == len(second) == 2
    assert len({*first}) == len({*second}) == 1 and first[0] != second[0]
    today = {time.strftime("%Y-%m-%d", time.gmtime(time.time() - ago_s)) for ago_s in (0, 60)}
    assert first[0][:10] in today


def test_auto_names_a_run_that_begins_with_the_checkpoint_of_another(tmp_path: Path) -> None:
    flags = ["--run.id", AUTO, "--run.dir", str(tmp_path), "--ckpt.path", "new", "--resume.path", "old/other"]
    assert named(load_config(["@debug/normal", *flags], {}), is_only_process=True).run.id != AUTO


def test_auto_names_a_run_of_one_process_and_its_founder(tmp_path: Path) -> None:
    for preset, environ in (("debug/normal", {}), ("debug/diloco", STORE)):
        asked = load_config([f"@{preset}", "--run.id", AUTO, "--run.dir", str(tmp_path)], environ)
        config = named(asked, is_only_process=True)
        assert config.run.id.startswith("2") and config.run.id != AUTO
        assert config.model_copy(update={"run": asked.run}) == asked


@pytest.mark.parametrize("asked", [[], ["--run.id", AUTO]])
def test_resuming_a_run_asks_for_its_name_and_tells_the_newest(tmp_path: Path, asked: list[str]) -> None:
    arguments = ["@debug/normal", "--ckpt.path", "checkpoints", "--resume", f"--run.dir={tmp_path}", *asked]
    with pytest.raises(ConfigError, match=r"needs the name of a run: --run\.id NAME, and .* has none yet"):
        named(load_config(arguments, {}), is_only_process=True)
    for age_s, name in enumerate(("third", "second", "first", "oldest")):
        metrics = tmp_path / name / "n0" / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.touch()
        os.utime(metrics, (1e9 - age_s, 1e9 - age_s))
    with pytest.raises(ConfigError, match=f"where {tmp_path} has third, second, first\\. Without one"):
        named(load_config(arguments, {}), is_only_process=False)
    go_on = load_config([*arguments, "--run.id", "second"], {})
    assert named(go_on, is_only_process=False) is go_on


def test_auto_is_refused_where_each_node_would_find_another_name() -> None:
    config = load_config(["@debug/diloco", "--elastic.start_nodes", "2", "--run.id", AUTO], STORE)
    with pytest.raises(ConfigError, match="waits for 2 nodes"):
        named(config, is_only_process=True)
