"""Trackers as sinks that may be absent, failing or stuck while the run goes on."""

from __future__ import annotations

import json
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

OpenSink = Callable[[object], BackgroundSink]
Reasons = Callable[[], list[str]]


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
def open_sink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], BackgroundSink]:
    """Opens a sink of this module in the place of wandb; None: it is not installed."""

    def open_one(module: object) -> BackgroundSink:
        monkeypatch.setitem(sys.modules, "wandb", module)  # type: ignore[arg-type]
        place: dict[str, Any] = {"node_dir": tmp_path / "run-1" / "n0", "config": {"train": 1}}
        return BackgroundSink("wandb", lambda: Wandb(project="zeroband", mode="offline", **place))

    return open_one


def sink_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "wandb-sink"}


def wait_until_only(others: set[threading.Thread]) -> None:
    """Wait for the thread that came to these; one that was dropped while it stood still never ends."""
    for thread in sink_threads() - others:
        thread.join(5)
        assert not thread.is_alive()


def test_sink_forwards_every_record_in_order_to_a_run_that_is_named_after_its_folders(
    open_sink: OpenSink, tmp_path: Path
) -> None:
    wandb = FakeWandb()
    sink = open_sink(wandb)
    records: list[dict[str, Any]] = [{"step": step, "train/loss": 1.0 / step} for step in range(1, 100)]
    for record in records:
        sink.write(record)
    sink.close()
    assert wandb.records == records
    assert wandb.is_finished
    named = {name: wandb.init_arguments[name] for name in ("group", "name", "dir", "mode", "config")}
    place = str(tmp_path / "run-1" / "n0")
    assert named == {
        "group": "run-1", "name": "run-1/n0", "dir": place, "mode": "offline", "config": {"train": 1},
    }  # fmt: skip


def refuse(_record: dict[str, Any]) -> None:
    raise RuntimeError("quota")


@pytest.mark.parametrize(
    ("module", "reason"), [(None, "ModuleNotFoundError: "), (FakeWandb(refuse), "RuntimeError: quota")]
)
def test_sink_drops_out_without_the_module_and_when_logging_fails(
    open_sink: OpenSink, reasons: Reasons, module: object, reason: str
) -> None:
    others, sink = sink_threads(), open_sink(module)
    sink.write({"step": 1})
    wait_until_only(others)
    for step in range(2, 50):
        sink.write({"step": step})
    sink.close()
    (said,) = reasons()
    assert said.startswith(reason)


def test_sink_drops_out_when_it_falls_behind(
    open_sink: OpenSink, monkeypatch: pytest.MonkeyPatch, reasons: Reasons
) -> None:
    release = threading.Event()
    monkeypatch.setattr(sinks, "_BACKLOG_RECORDS", 3)
    sink = open_sink(FakeWandb(lambda record: bool(release.wait(5)) and None))
    for step in range(10):
        sink.write({"step": step})
    sink.close()
    release.set()
    assert reasons() == ["3 records behind"]


def test_sink_does_not_wait_for_a_stuck_service_at_the_end(
    open_sink: OpenSink, monkeypatch: pytest.MonkeyPatch, reasons: Reasons
) -> None:
    release = threading.Event()

    def hang_and_fail(record: dict[str, Any]) -> None:
        release.wait(5)
        raise TimeoutError

    monkeypatch.setattr(sinks, "_CLOSE_DEADLINE_S", 0.02)
    others, sink = sink_threads(), open_sink(FakeWandb(hang_and_fail))
    sink.write({"step": 1})
    sink.close()
    release.set()
    wait_until_only(others)
    assert reasons() == ["not finished after 0.02 s"]


RECORDS: list[dict[str, Any]] = [
    {"step": 3, "at_s": 30.0, "train/loss": 2.5, "outer/digest": "ab12"},
    {"step": 4, "at_s": 31.0, "train/loss": 2.25, "outer/round": 1},
]


@pytest.mark.slow
def test_tensorboard_has_a_curve_of_each_number(tmp_path: Path, reasons: Reasons) -> None:
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs the extra tensorboard"
    )
    sink = BackgroundSink("tensorboard", lambda: TensorBoard(node_dir=tmp_path / "n0"))
    for record in RECORDS:
        sink.write(record)
    sink.close()
    assert reasons() == []
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
    with pytest.raises(RuntimeError, match=r"TRACKIO_SPACE_ID is set but observe\.trackio\.space_id is not"):
        Trackio(project="mine", space_id=None, node_dir=tmp_path, config={})
