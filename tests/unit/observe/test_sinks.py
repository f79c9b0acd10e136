"""Trackers as sinks that may be absent, failing or stuck without anybody waiting for them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zeroband
from zeroband.observe import sinks
from zeroband.observe.sinks import BackgroundSink
from zeroband.observe.trackers import TensorBoard, Trackio, Wandb


class FakeWandb(SimpleNamespace):
    """What the sink uses of the module wandb; `on_log` may raise or block."""

    def __init__(self, on_log: Callable[[dict[str, Any]], None] = lambda record: None) -> None:
        super().__init__(Settings=dict, init=self._init)
        self.on_log = on_log
        self.init_arguments: dict[str, Any] = {}
        self.records: list[dict[str, Any]] = []
        self.is_finished = False

    def _init(self, **arguments: Any) -> FakeWandb:
        self.init_arguments = arguments
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        assert (name, step_metric) == ("*", "step")

    def log(self, record: dict[str, Any]) -> None:
        self.on_log(record)
        self.records.append(record)

    def finish(self) -> None:
        self.is_finished = True


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("zeroband"), "propagate", True)
    return lambda: [record.__dict__["fields"]["reason"] for record in caplog.records if record.name == sinks.__name__]


def install(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]


def open_sink(tmp_path: Path) -> BackgroundSink:
    node_dir = tmp_path / "run-1" / "n0"
    return BackgroundSink(
        "wandb", lambda: Wandb(project="zeroband", mode="offline", node_dir=node_dir, config={"train": 1})
    )


def sink_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "wandb-sink"}


def wait_until_only(others: set[threading.Thread]) -> None:
    """Wait for the thread that came to these; one that was dropped while it stood still never ends."""
    for thread in sink_threads() - others:
        thread.join(5)
        assert not thread.is_alive()


def test_sink_forwards_every_record_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    install(monkeypatch, wandb)
    sink = open_sink(tmp_path)
    records: list[dict[str, Any]] = [{"step": step, "train/loss": 1.0 / step} for step in range(1, 100)]
    for record in records:
        sink.write(record)
    sink.close()
    assert wandb.records == records
    assert wandb.is_finished


def test_wandb_sink_names_the_run_after_its_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    install(monkeypatch, wandb)
    open_sink(tmp_path).close()
    assert wandb.init_arguments["group"] == "run-1"
    assert wandb.init_arguments["name"] == "run-1/n0"
    assert wandb.init_arguments["dir"] == str(tmp_path / "run-1" / "n0")
    assert wandb.init_arguments["mode"] == "offline"
    assert wandb.init_arguments["config"] == {"train": 1}


def test_sink_goes_on_without_the_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    install(monkeypatch, None)  # the import raises ModuleNotFoundError
    others, sink = sink_threads(), open_sink(tmp_path)
    wait_until_only(others)
    sink.write({"step": 1})
    sink.close()
    assert len(warnings()) == 1
    assert warnings()[0].startswith("ModuleNotFoundError: ")


def test_sink_drops_out_when_logging_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    def refuse(record: dict[str, Any]) -> None:
        raise RuntimeError("quota")

    install(monkeypatch, FakeWandb(refuse))
    others, sink = sink_threads(), open_sink(tmp_path)
    sink.write({"step": 1})
    wait_until_only(others)
    for step in range(2, 50):
        sink.write({"step": step})
    sink.close()
    assert warnings() == ["RuntimeError: quota"]


def test_sink_drops_out_when_it_falls_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    release = threading.Event()
    install(monkeypatch, FakeWandb(lambda record: bool(release.wait(5)) and None))
    monkeypatch.setattr(sinks, "_BACKLOG_RECORDS", 3)
    sink = open_sink(tmp_path)
    for step in range(10):
        sink.write({"step": step})
    sink.close()
    release.set()
    assert warnings() == ["3 records behind"]


def test_sink_does_not_wait_for_a_stuck_service_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Callable[[], list[str]]
) -> None:
    release = threading.Event()

    def hang_and_fail(record: dict[str, Any]) -> None:
        release.wait(5)
        raise TimeoutError

    install(monkeypatch, FakeWandb(hang_and_fail))
    monkeypatch.setattr(sinks, "_CLOSE_DEADLINE_S", 0.02)
    others, sink = sink_threads(), open_sink(tmp_path)
    sink.write({"step": 1})
    sink.close()
    release.set()
    wait_until_only(others)
    assert warnings() == ["not finished after 0.02 s"]


RECORDS: list[dict[str, Any]] = [
    {"step": 3, "at_s": 30.0, "train/loss": 2.5, "outer/digest": "ab12"},
    {"step": 4, "at_s": 31.0, "train/loss": 2.25, "outer/round": 1},
]


@pytest.mark.slow
def test_tensorboard_has_a_curve_of_each_number(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    sink = BackgroundSink("tensorboard", lambda: TensorBoard(node_dir=tmp_path / "n0"))
    for record in RECORDS:
        sink.write(record)
    sink.close()
    assert warnings() == []
    written = accumulators.EventAccumulator(str(tmp_path / "n0" / "tensorboard")).Reload()
    curves = {tag: [(e.step, e.wall_time, e.value) for e in written.Scalars(tag)] for tag in written.Tags()["scalars"]}
    assert curves == {"train/loss": [(3, 30.0, 2.5), (4, 31.0, 2.25)], "outer/round": [(4, 31.0, 1.0)]}


TRACKIO_PROBE = """
import json, socket, sys
from pathlib import Path

def refuse(self, address):
    if self.family != socket.AF_UNIX:
        raise AssertionError(f"a connection to {address}")

socket.socket.connect = refuse
socket.getaddrinfo = lambda *a, **k: refuse(None, a)
from zeroband.observe.sinks import BackgroundSink
from zeroband.observe.trackers import Trackio

def open_run():
    return Trackio(project="mine", space_id=None, node_dir=Path("run-1/n0"), config={"train": 1})

records = json.loads(sys.argv[1])
for some in (records[:1], records[1:]):  # a node that starts again
    sink = BackgroundSink("trackio", open_run)
    for record in some:
        sink.write(record)
    sink.close()
from trackio.sqlite_storage import SQLiteStorage as store
(name,) = store.get_runs("mine")
written = store.get_logs("mine", name)
print(json.dumps([[l["step"], l.get("train/loss"), l.get("outer/round"), l.get("outer/digest")] for l in written]))
"""


@pytest.mark.slow
def test_trackio_keeps_the_curves_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="needs the extra trackio")
    command = [sys.executable, "-c", TRACKIO_PROBE, json.dumps(RECORDS)]
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "TRACKIO_DIR": str(tmp_path / "kept")}
    environ["PYTHONPATH"] = str(Path(zeroband.__file__).parents[1])
    ended = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == [[3, 2.5, None, None], [4, 2.25, 1, None]]
    assert list((tmp_path / "kept").glob("mine*.db"))


def test_trackio_sends_nothing_because_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_SPACE_ID", "somebody/else")
    with pytest.raises(RuntimeError, match=r"TRACKIO_SPACE_ID is set and observe\.trackio\.space_id is not"):
        Trackio(project="mine", space_id=None, node_dir=tmp_path, config={})
