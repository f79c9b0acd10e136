"""The reader of a run directory, on files written by the real logs as a run of several nodes writes them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import zeroband
from zeroband.observe.events import EventLog
from zeroband.observe.facts import FolderFacts
from zeroband.observe.metrics import METRICS_FILE, MetricsLog, MetricValue
from zeroband.observe.status import RunReader, render
from zeroband.observe.view import NodeView, RunView, SourceView, node_id_of_member
from zeroband.tools.status import main
from zeroband.tools.top.scene import Scene
from zeroband.tools.top.screen import progress_line, traffic


class Node:
    """Writes what a trainer writes; all nodes share one clock that ticks with every line."""

    clock = itertools.count(1_000_000.0)

    def __init__(self, run_dir: Path, node_id: str) -> None:
        self.node_id = node_id
        self.member_id = ""
        self._starts = 0
        self._metrics = MetricsLog(run_dir / node_id, now=lambda: next(self.clock))
        self.events = EventLog(run_dir / node_id, now=lambda: next(self.clock))

    def start(self) -> None:
        self.events.emit("node_started", total_steps=100, local_world_size=1, parameters=1000)

    def join(self, round: int = 0) -> None:
        self._starts += 1
        self.member_id = f"{self.node_id}#{self._starts}"
        self.events.emit("joined", member_id=self.member_id, round=round)

    def step(self, step: int, loss: float = 3.0, **outer: MetricValue) -> None:
        values: dict[str, MetricValue] = {"train/loss": loss, "train/tokens": 64 * step, "train/tokens_per_s": 640.0}
        self._metrics.record(step, values | {f"outer/{name}": value for name, value in outer.items()})

    def mix(self, step: int, **sources: tuple[int, float, float | None]) -> None:
        """A step of several sources: targets, passes and loss of each."""
        values: dict[str, MetricValue | None] = {"train/loss": 3.0, "data/pass": 0}
        for name, (tokens, data_pass, loss) in sources.items():
            values |= {f"data/tokens/{name}": tokens or None, f"data/pass/{name}": data_pass}
            values[f"train/loss/{name}"] = loss
        self._metrics.record(step, values)

    def commit(self, round: int, members: list[str], digest: str = "d1", epoch: int = 1, line: str = "line") -> None:
        progress = {"founding": line, "inner_step": 10 * round}
        self.events.emit("round_committed", round=round, epoch=epoch, members=members, digest=digest, progress=progress)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "demo"


def look(run_dir: Path) -> RunView:
    return RunReader(FolderFacts(run_dir)).read()


def founded(run_dir: Path, *node_ids: str) -> list[Node]:
    nodes = [Node(run_dir, node_id) for node_id in node_ids]
    for node in nodes:
        node.start()
        node.join()
    return nodes


def test_reader_of_a_folder_that_is_not_there_sees_no_nodes(run_dir: Path) -> None:
    view = look(run_dir)
    assert (view.run_id, view.nodes, view.members, view.round) == ("demo", (), (), None)


def test_reader_sees_a_node_from_start_to_end_and_where_it_stands_on_its_way_in(run_dir: Path) -> None:
    reader, node, states, shown = RunReader(FolderFacts(run_dir)), Node(run_dir, "n0"), list[str](), list[str]()
    way = {"why": "join", "since": "12:00:00Z"}
    for act in (
        node.start,
        lambda: node.events.emit("join_state", state="discover", **way),
        lambda: node.events.emit("join_state", state="fetching", **way),
        lambda: node.events.emit("recovering", round=-1),
        lambda: node.join(round=7),
        lambda: node.events.emit("join_state", state="member", **way),
        lambda: node.step(1),
        lambda: node.events.emit("run_finished", step=1),
        lambda: node.events.emit("left", reason="finished"),
    ):
        act()
        view = reader.read()
        states.append(view.nodes[0].state)
        shown.append(render(view))
    assert states == ["starting", *["joining"] * 3, *["training"] * 3, "finished", "finished"]
    for text, state in zip(shown[1:4], ("joining: discover", "joining: fetching", "joining: fetching"), strict=True):
        assert state in text
    assert "training" in shown[5] and ": member" not in shown[5] and "join_state" not in shown[5]


def test_reader_shows_the_numbers_of_the_newest_line(run_dir: Path) -> None:
    [node] = founded(run_dir, "n0")
    node.step(1, 5.5)
    node.step(2, 4.5, round=1, epoch=3, digest="ab", sent_bytes=10, received_bytes=20, ddp_bytes=300)
    node.step(3, 4.0, sent_bytes=1, received_bytes=2, ddp_bytes=3)
    run = look(run_dir)
    [view] = run.nodes
    assert (view.step, view.total_steps, view.parameters) == (3, 100, 1000)
    assert (view.first_loss, view.loss, run.loss_curve) == (5.5, 4.0, (5.5, 4.5, 4.0))
    assert (view.tokens, view.tokens_per_s) == (192, 640.0)
    assert (view.round, view.epoch, view.digest) == (1, 3, "ab")
    assert (view.sent_bytes, view.received_bytes, view.ddp_bytes) == (11, 22, 303)


def test_reader_that_follows_sees_the_same_as_one_that_comes_late(run_dir: Path) -> None:
    reader = RunReader(FolderFacts(run_dir))
    first, second = founded(run_dir, "n0", "n1")
    for step in range(1, 30):
        first.step(step, sent_bytes=5)
        reader.read()
        second.step(step, sent_bytes=7)
        if step % 10 == 0:
            first.commit(step // 10, [first.member_id, second.member_id], digest=f"d{step}")
            reader.read()
            second.commit(step // 10, [first.member_id, second.member_id], digest=f"d{step}")
    assert reader.read() == look(run_dir)


def test_reader_counts_lines_that_are_no_records(run_dir: Path) -> None:
    [node] = founded(run_dir, "n0")
    node.step(1)
    with (run_dir / "n0" / METRICS_FILE).open("ab") as file:
        file.write(b'{"step": "seven", "at_s": 1}\nrubbish\n{}\n')
    node.step(2)
    view = look(run_dir)
    assert (view.step, view.skipped_lines) == (2, 3)


def test_reader_shows_a_killed_node_as_lost_until_it_is_back(run_dir: Path) -> None:
    reader = RunReader(FolderFacts(run_dir))
    first, second = founded(run_dir, "n0", "n1")
    second.step(7, 2.0, sent_bytes=10)
    first.events.emit("peer_lost", round=1, member_ids=[second.member_id])
    first.events.emit("epoch_changed", epoch=2, members=[first.member_id])
    states, members = [reader.read().nodes[1].state], [reader.read().members]
    second.start()
    states.append(reader.read().nodes[1].state)
    second.events.emit("recovering", round=3)
    states.append(reader.read().nodes[1].state)
    second.events.emit("recovered", round=3, digest="d3", took_s=0.5)
    second.join(4)
    first.events.emit("epoch_changed", epoch=3, members=[first.member_id, second.member_id])
    states.append(reader.read().nodes[1].state)
    members.append(reader.read().members)
    assert states == ["lost", "starting", "joining", "training"]
    assert members == [("n0",), ("n0", "n1")]
    second.step(40, 1.0, sent_bytes=5)
    view = reader.read().nodes[1]
    assert (view.starts, view.first_loss, view.sent_bytes, view.step) == (2, 2.0, 15, 40)


@pytest.mark.parametrize("has_outer", [True, False])
def test_reader_forgets_an_earlier_run_of_the_same_name(run_dir: Path, has_outer: bool) -> None:
    node = Node(run_dir, "n0")
    for loss, digest in ((5.0, "old"), (4.0, "new")):
        node.start()
        if has_outer:
            node.join()
            node.commit(0, [node.member_id], digest, line=f"line of {digest}")
        node.step(1, loss, sent_bytes=10)
    view = look(run_dir)
    assert (view.nodes[0].first_loss, view.nodes[0].sent_bytes) == (4.0, 10)
    assert not has_outer or view.loss_curve == (4.0,)
    assert view.disagreements == ()


def test_run_view_is_that_of_the_newest_line_of_rounds_whatever_nodes_an_earlier_run_had(run_dir: Path) -> None:
    [dead] = founded(run_dir, "old0")
    dead.step(90, sent_bytes=10, ddp_bytes=100)
    dead.commit(30, [dead.member_id], "far", epoch=7)
    new = founded(run_dir, "new0", "new1")
    members = [node.member_id for node in new]
    for node in new:
        node.commit(0, members, "near", epoch=1, line="another line")
        node.step(1, sent_bytes=1, ddp_bytes=2)
    view = look(run_dir)
    assert (view.round, view.epoch, view.members) == (0, 1, ("new0", "new1"))
    assert (view.sent_bytes, view.ddp_bytes, len(view.nodes)) == (2, 4, 3)


def test_nodes_that_go_on_in_another_run_of_the_name_are_told_and_not_counted(run_dir: Path) -> None:
    first, second = founded(run_dir, "old0", "new0")
    first.commit(1, [first.member_id], "far", line="line")
    second.commit(1, [second.member_id], "near", line="another line")
    first.commit(2, [first.member_id], "far", line="line")
    view = look(run_dir)
    assert [node.node_id for node in view.current] == ["new0"]
    assert [node.node_id for node in view.foreign_nodes] == ["old0"]
    assert "old0 belongs to another run named demo and is not counted" in render(view)
    first.events.emit("left", reason="done")
    assert look(run_dir).foreign_nodes == ()


def test_status_says_what_cannot_be_read(run_dir: Path) -> None:
    [node] = founded(run_dir, "n0")
    node.step(1)
    (run_dir / "n1" / "events.jsonl").mkdir(parents=True)
    assert "cannot read n1/events.jsonl: Is a directory" in render(look(run_dir))


def test_status_says_how_many_members_have_their_files_elsewhere(run_dir: Path) -> None:
    """On one of two machines that share no disk."""
    here, there = Node(run_dir, "n0"), Node(run_dir.parent / "other machine", "n1")
    for node in (here, there):
        node.start()
        node.join()
    here.commit(1, [here.member_id, there.member_id])
    reader = RunReader(FolderFacts(run_dir))
    assert "2 nodes are in; files of 1 are here; --store shows all" in render(reader.read())
    here.commit(2, [here.member_id], epoch=2)
    assert "files of" not in render(reader.read())


def test_run_view_takes_digests_of_metrics_too_and_without_outer_counts_the_nodes_that_train(run_dir: Path) -> None:
    for node, digest in zip(founded(run_dir, "n0", "n1"), ("a", "b"), strict=True):
        node.step(1, round=4, digest=digest)
    assert look(run_dir).disagreements == (4,)
    alone = Node(run_dir.parent / "alone", "n2")
    alone.start()
    alone.step(1)
    assert look(run_dir.parent / "alone").members == ("n2",)


def test_node_id_of_a_member() -> None:
    assert (node_id_of_member("a-1#ff#02"), node_id_of_member("plain")) == ("a-1#ff", "plain")


def test_render_shows_nodes_bytes_and_events(run_dir: Path) -> None:
    first, second = founded(run_dir, "n0", "n1")
    for node in (first, second):
        node.step(50, 5.0)
        node.step(60, 2.5, sent_bytes=2_000, ddp_bytes=500_000)
        node.commit(3, [first.member_id, second.member_id], "0123456789abcdef", epoch=2)
    lines = render(look(run_dir), now=lambda: next(Node.clock)).splitlines()
    row = "n0 training 60/100 5.000 -> 2.500 640 3 2 0123456789ab 2 kB 500 kB -"
    assert lines[1].split() == row.split()
    assert "run demo, 2 nodes in: n0, n1" in lines
    assert "sent 4 kB by all nodes; per-step data parallel would have sent 1 MB, 250 times as much" in lines
    told = {line.split(" ", 1)[1] for line in lines[-2:]}  # by the clock that both agree on: of one round
    assert told == {"n0 joined member_id=n0#1 round=0", "n1 joined member_id=n1#1 round=0"}


def test_render_shows_a_node_that_writes_no_more_as_silent_whatever_its_clock_says(run_dir: Path) -> None:
    dead, done, alive = founded(run_dir, "dead", "done", "alive")
    for node in (dead, done, alive):
        node.step(1)
    done.events.emit("left", reason="done")
    written_s = time.time() - 1000
    for path in [*(run_dir / "dead").iterdir(), *(run_dir / "done").iterdir()]:
        os.utime(path, (written_s, written_s))
    rows = render(look(run_dir), now=time.time).splitlines()[1:4]
    since = time.strftime("silent since %Y-%m-%d %H:%M", time.localtime(written_s))
    assert [(row.split()[0], since in row, "640" in row) for row in rows] == [
        ("alive", False, True),
        ("dead", True, False),
        ("done", False, True),
    ]
    assert [row.split()[1] for row in rows] == ["training", "training,", "left"]


def test_node_is_heard_of_again_by_the_readers_clock(run_dir: Path) -> None:
    [node] = founded(run_dir, "n0")
    for path in (run_dir / "n0").iterdir():
        os.utime(path, (0.0, 0.0))
    clock_s = [50.0]
    reader = RunReader(FolderFacts(run_dir), clock=lambda: clock_s[0])
    assert reader.read().nodes[0].silent_s > 1e9
    clock_s[0] = 60.0
    node.step(1)
    assert reader.read().nodes[0].silent_s == 0.0
    clock_s[0] = 67.0
    assert reader.read().nodes[0].silent_s == 7.0


@pytest.mark.parametrize("name", ["missing", ""])
def test_main_refuses_a_folder_without_a_run(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / name)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_main_prints_the_run_and_fails_when_nodes_hold_different_states(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = founded(run_dir, "n0", "n1")
    assert main([str(run_dir)]) == 0
    assert "run demo, " in capsys.readouterr().out
    for node, digest in zip(nodes, ("a", "b"), strict=True):
        node.commit(5, [], digest)
    assert main([str(run_dir)]) == 3
    assert "DIVERGED: nodes hold different outer states after round 5" in capsys.readouterr().out


def test_main_follows_until_it_is_interrupted(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [node] = founded(run_dir, "n0")
    looks = iter([lambda: node.step(41), lambda: None, lambda: node.step(42)])

    def pause(seconds: float) -> None:
        act = next(looks, None)
        if act is None:
            raise KeyboardInterrupt
        act()

    monkeypatch.setattr("zeroband.tools.status.time.sleep", pause)
    assert main([str(run_dir), "--follow"]) == 0
    output = capsys.readouterr().out
    assert (output.count("node  state"), "41/100" in output, "42/100" in output) == (3, True, True)


@pytest.mark.slow
def test_status_loads_neither_torch_nor_wandb() -> None:
    code = "import sys, zeroband.tools.status; print(*({'torch', 'wandb', 'pydantic', 'redis'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(Path(zeroband.__file__).parents[1])}
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout == b"\n"


def test_sources_of_a_mixture_are_summed_up_over_all_nodes(run_dir: Path) -> None:
    first, second = founded(run_dir, "n0", "n1")
    first.mix(1, web=(30, 0.5, 2.0), code=(0, 0.0, None))
    first.mix(2, web=(0, 0.5, None), code=(10, 0.25, 1.0))
    second.mix(1, web=(300, 0.75, 4.0), code=(0, 0.125, None))
    view = look(run_dir)
    web, code = SourceView(30, 0.5, 2.0), SourceView(10, 0.25, 1.0)
    assert view.nodes[0].sources == {"web": web, "code": code}
    assert view.sources == {"web": SourceView(330, 0.75, 3.0), "code": code}
    shown = "trained by all nodes: web 330 tokens (pass 0.75, loss 3.0000), code 10 tokens (pass 0.25, loss 1.0000)"
    assert shown in render(view) and "trained, by" not in render(RunView("demo", view.nodes[:0]))


def test_render_shows_which_of_several_stores_is_in_use(run_dir: Path) -> None:
    first, second = founded(run_dir, "n0"), Node(run_dir, "n1")
    assert "\nstore " not in render(look(run_dir))
    second.start()
    for node, store, number in ((*first, "redis://a:6379", 1), (second, "redis://b:6379", 2)):
        node.events.emit("store_in_use", store=store, generation=number)
    second.join()
    for node in (*first, second):
        node.commit(1, [node.member_id])
    assert "store redis://b:6379, generation 2" in render(look(run_dir)).splitlines()


# -- the figures of a run as a whole: one for the loss, wherever it is shown ---------------------------------------

MEMBERS = ("a#1", "b#1")
A = NodeView("a", "finished", founding="f", epoch=2, members=MEMBERS, round=3, loss=1.5, first_loss=5.0, sent_bytes=10)
B = replace(A, node_id="b", loss=2.5, first_loss=7.0)
LOST = replace(A, node_id="c", state="lost", epoch=1, loss=9.0, first_loss=6.0)


def shown(*nodes: NodeView) -> Scene:
    run = RunView("r", nodes)
    return Scene("", run, 0.0, ("a", "b"), (), "")


def test_loss_of_a_run_is_the_mean_of_its_members_newest_ones() -> None:
    run = RunView("r", (A, B, LOST))
    assert (run.first_loss, run.loss) == (6.0, 2.0)
    assert "loss 2.000" in progress_line(shown(A, B, LOST))
    assert RunView("r", (A, replace(B, loss=float("nan")))).loss == 1.5
    assert RunView("r", (LOST,)).loss == 9.0
    assert RunView("r").loss is None


def test_one_node_is_not_called_nodes() -> None:
    for members, said in (((), "0 nodes in"), (("a#1",), "1 node in"), (("a#1", "b#1"), "2 nodes in")):
        run = RunView("r", (replace(A, members=members),))
        assert f", {said}: " in render(run)
        assert f"  {said}  " in progress_line(Scene("", run, 0.0, ("a",), (), ""))


def test_all_nodes_are_said_to_have_sent_when_each_has_made_a_round() -> None:
    ahead = replace(A, ddp_bytes=100)
    assert traffic(shown(ahead, replace(B, round=0, sent_bytes=0))) == "nothing sent yet"
    assert traffic(shown(ahead, B)).startswith("all nodes sent 20 B so far")
