"""A run's folder over several starts: continued, refused or moved aside, never mixed; and wrong ones of checkpoints."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

import zeroband
from zeroband.checkpoint.ownership import require_place
from zeroband.config import load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import ConfigError
from zeroband.node.mesh import init_local_mesh
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.metrics import METRICS_FILE
from zeroband.runtime.loop import train
from zeroband.tools.cluster import RedisServer

pytestmark = pytest.mark.slow

TINY = {
    "node.id": "solo",
    "run.id": "again",
    "model.d_model": 32,
    "model.n_layers": 1,
    "data.seq_length": 16,
    "data.source.type": "synthetic",
    "data.source.documents": 50,
    "train.batch_size": 4,
    "train.dtype": "float32",
    "fault.detect_s": 1,
}
FILES = (METRICS_FILE, EVENTS_FILE)


def start(folder: Path, *argv: str, steps: int = 2, environ: Mapping[str, str] | None = None) -> None:
    settings = {**TINY, "run.dir": folder / "runs", "data.cache_dir": folder / "cache", "train.total_steps": steps}
    with ExitStack() as stack:
        local = init_local_mesh({})
        stack.callback(local.close)
        config = load_config([*(f"--{key}={value}" for key, value in settings.items()), *argv], environ or {})
        train(config, local, Departure(1.0), stack)


def place(folder: Path) -> Path:
    return folder / "runs/again/solo"


def written(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def steps_in(data: Mapping[str, bytes]) -> list[int]:
    return [json.loads(line)["step"] for line in data[METRICS_FILE].splitlines()]


def test_second_run_of_a_name_is_refused_and_leaves_the_files_as_they_are(tmp_path: Path) -> None:
    start(tmp_path)
    before = written(place(tmp_path))
    with pytest.raises(ConfigError, match=r"holds another run .*run.id='again'.*--resume.*--run.id.*--run.start-over"):
        start(tmp_path)
    assert written(place(tmp_path)) == before and steps_in(before) == [1, 2]


def test_run_that_starts_over_has_files_of_its_own(tmp_path: Path) -> None:
    start(tmp_path)
    first = written(place(tmp_path))
    start(tmp_path, "--run.start-over", steps=3)
    second = written(place(tmp_path))
    start(tmp_path, "--run.start-over", steps=1)
    assert [written(place(tmp_path) / f"before-{number}") for number in (1, 2)] == [first, second]
    assert (steps_in(second), steps_in(written(place(tmp_path)))) == ([1, 2, 3], [1])


def test_run_that_is_resumed_goes_on_in_its_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saves = ["--ckpt.path", str(tmp_path), "--ckpt.every-rounds", "2", "--resume"]
    start(tmp_path, *saves)
    assert "nothing to resume" in caplog.text, "the same command line begins and goes on"
    caplog.clear()
    first = written(place(tmp_path))
    start(tmp_path, *saves, steps=4)
    assert "nothing to resume" not in caplog.text
    both = written(place(tmp_path))
    assert all(both[name].startswith(first[name]) for name in FILES) and steps_in(both) == [1, 2, 3, 4]


def test_run_whose_folders_are_removed_makes_them_anew_and_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Removal(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("step 2/"):
                for folder in ("runs", "saved"):
                    shutil.rmtree(tmp_path / folder)

    log, removal = logging.getLogger("zeroband"), Removal()
    saves = [f"--ckpt.path={tmp_path / 'saved'}", "--ckpt.every-rounds", "3", "--observe.log-every-steps", "1"]
    caplog.set_level(logging.INFO)
    log.addHandler(removal)
    try:
        start(tmp_path, *saves, steps=6)
    finally:
        log.removeHandler(removal)
    warnings = [record.message for record in caplog.records if record.name == "zeroband.runtime.report"]
    assert warnings.count("the run's folder was removed; recreated it without its former content") == 1
    assert "file was removed" not in caplog.text
    session = json.loads((place(tmp_path) / "run.json").read_text())["session"]
    assert json.loads((tmp_path / "saved/again/owner.json").read_text())["session"] == session
    assert load_config([f"@{place(tmp_path) / 'config.toml'}"], {}).train.total_steps == 6
    caplog.clear()
    start(tmp_path, *saves, "--resume", steps=8)
    assert "nothing to resume" not in caplog.text
    assert steps_in(written(place(tmp_path))) == [3, 4, 5, 6, 7, 8]


def test_run_that_finds_nothing_to_resume_says_so_and_moves_the_files_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path)
    first = written(place(tmp_path))
    start(tmp_path, "--ckpt.path", str(tmp_path / "empty"), "--resume", steps=1)
    assert "nothing to resume" in caplog.text
    assert written(place(tmp_path) / "before-1") == first and steps_in(written(place(tmp_path))) == [1]


def test_run_among_others_is_told_from_one_before_by_its_session(tmp_path: Path) -> None:
    outer = ["--outer.type", "diloco", "--outer.inner-steps", "2"]
    with RedisServer() as redis:
        environ = {"ZERO_BAND_STORE__URL": redis.url}
        start(tmp_path, *outer, environ=environ)
        first = written(place(tmp_path))
        redis.stop()
        redis.start(empty=True)
        with pytest.raises(ConfigError, match="holds another run"):
            start(tmp_path, *outer, environ=environ)
        assert written(place(tmp_path)) == first
        start(tmp_path, *outer, "--run.start-over", environ=environ)
        assert written(place(tmp_path) / "before-1") == first


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("s4://bucket/ckpt", r"s4:// is no storage that is known here; did you mean s3://"),
        ("file:/x", r"is no URL.*file://\.\.\..*write /x"),
        ("file://x", r"three slashes: file:///x"),
        ("s3:bucket/ckpt", r"is no URL.*s3://\.\.\."),
    ],
)
def test_mistyped_url_of_checkpoints_is_an_error_of_the_configuration(path: str, says: str) -> None:
    with pytest.raises(ConfigError, match=rf"ckpt\.path.*{says}"):
        load_config(["--ckpt.path", path], {})


@pytest.mark.parametrize(
    "path", ["/somewhere/ckpt", "s3://bucket/ckpt", "memory://x", "./ck:pt", "simplecache::s3://b"]
)
def test_folders_and_urls_of_checkpoints_are_taken(path: str) -> None:
    assert load_config(["--ckpt.path", path], {}).ckpt.path == path


@pytest.mark.parametrize(
    ("path", "says"), [("mising/ckpt", "there is no folder {0}/mising"), ("file", "is a file")], ids=["parent", "file"]
)
def test_place_where_checkpoints_cannot_be_is_an_error(tmp_path: Path, path: str, says: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError) as refused:
        require_place(str(tmp_path / path), "again")
    assert str(refused.value).startswith("ckpt.path=") and says.format(tmp_path) in str(refused.value)


def test_start_ends_where_checkpoints_cannot_be(tmp_path: Path) -> None:
    trainer, path = Path(zeroband.__file__).parent / "train.py", tmp_path / "mising/ckpt"
    arguments = ["--run.dir", str(tmp_path / "runs"), "--ckpt.path", str(path), "--train.total-steps", "1"]
    done = subprocess.run(
        [sys.executable, str(trainer), *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.strip().splitlines()[-1].startswith("zeroband: ckpt.path=")
    assert not list((tmp_path / "runs").rglob(METRICS_FILE)), "it trained"
