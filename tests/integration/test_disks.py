"""Nodes with disks of their own, or a common one, begin again: real processes, a real store, real files.

Each case of `CASES` is a row of the table in docs/checkpoints.md.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.test_resume import DEADLINE_S, TINY, until
from tests.tiny_runs import ForkedCluster

from zeroband.checkpoint.layout import LATEST, MARKS, folder_of, step_of
from zeroband.tools.cluster import LocalCluster, NodeProcess

pytestmark = [pytest.mark.faults, pytest.mark.slow]

RUN_ID = "disks"
FOREVER = ("--train.total-steps", "1000000", "--fault.inject", "inner@+0=TAKES0.02")
OLDER, MIDDLE, NEWEST = 0, 1, 2
"""Places of the three checkpoints of `saved`; which steps they are of is chance, since a busy writer skips some."""


@contextmanager
def nodes_of(folder: Path, nodes: int, *more: str) -> Iterator[LocalCluster]:
    """Nodes of one run; what they hold lies below `folder`."""
    (folder / "shm").mkdir(parents=True, exist_ok=True)
    arguments = (*TINY, *FOREVER, *more, "--data.cache-dir", str(folder / "cache"))
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "ZERO_BAND_NODE__SHM_DIR": str(folder / "shm")}
    with ForkedCluster(folder / "runs", arguments, nodes=nodes, env=env, run_id=RUN_ID) as cluster:
        yield cluster


def disk(folder: Path, node_id: str) -> tuple[str, str]:
    (folder / node_id).mkdir(exist_ok=True)
    return "--ckpt.path", str(folder / node_id)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the checkpoints of three steps."""
    folder = tmp_path_factory.mktemp("saved")
    with nodes_of(folder, 1) as cluster:
        node = cluster.start("node0", arguments=disk(folder, "disk"))
        until(cluster, lambda: len(node.events("checkpoint_committed")) >= 4, "three checkpoints")
        node.kill()
    kept = folder / "disk" / RUN_ID
    for found in sorted(kept.glob("step_*"))[3:]:
        shutil.rmtree(found)
    (kept / LATEST).write_text(folder_of(steps_of(kept)[NEWEST]))
    return kept


def steps_of(place: Path) -> list[int]:
    return sorted(step for entry in place.iterdir() if (step := step_of(entry.name)) is not None)


def has(*which: int, harm: Callable[[Path], None] | None = None) -> Callable[[Path, Path], None]:
    """A disk with these steps, the last of them harmed."""

    def make(saved: Path, place: Path) -> None:
        names = [folder_of(step) for step in steps_of(saved)]
        if which:
            unwanted = [name for number, name in enumerate(names) if number not in which]
            shutil.copytree(saved, place, ignore=shutil.ignore_patterns(*unwanted, MARKS))
            (place / LATEST).write_text(names[max(which)])
        if harm is not None:
            harm(place / names[max(which)])

    return make


def flip(step: Path) -> None:
    """A byte of the parameters is another one: the sizes do not tell."""
    file = step / "outer/model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def cut(step: Path) -> None:
    """It was never finished, or half copied."""
    (step / "manifest.json").unlink()


def of_another_model(step: Path) -> None:
    """The folder is that of a run of another model."""
    for manifest in step.parent.glob("*/manifest.json"):
        manifest.write_text("{}")
    owner = step.parent / "owner.json"
    owner.write_text(owner.read_text().replace('"layout": "', '"layout": "another'))


newest, older, missing = has(OLDER, MIDDLE, NEWEST), has(OLDER), has()
damaged, partial = has(OLDER, NEWEST, harm=flip), has(OLDER, NEWEST, harm=cut)
only_damaged, foreign = has(NEWEST, harm=flip), has(NEWEST, harm=of_another_model)


@dataclass(frozen=True)
class Case:
    """Disks in the order in which their nodes come, and what becomes of them."""

    disks: Sequence[Callable[[Path, Path], None]]
    which: int | None
    """Which checkpoint all begin again on; None: a new run."""
    fetches: Sequence[bool] = ()
    """Which nodes fetch the state from another one; none: all have it."""
    arguments: Sequence[Sequence[str]] = ()
    """Of each node, with STEP for that of the checkpoint that is expected; none: --resume."""


CASES = {
    "newest, older": Case((newest, older), NEWEST, (False, True)),
    "newest, missing": Case((newest, missing), NEWEST, (False, True)),
    "missing, newest": Case((missing, newest), NEWEST, (True, False)),
    "newest, newest": Case((newest, newest), NEWEST),
    "newest, partial": Case((newest, partial), NEWEST, (False, True)),
    "partial, older": Case((partial, older), OLDER),
    "damaged, newest": Case((damaged, newest), NEWEST, (True, False)),
    "damaged, has the middle one": Case((damaged, has(OLDER, MIDDLE)), MIDDLE, (True, False)),
    "only damaged, older": Case((only_damaged, older), OLDER, (True, False)),
    "missing, missing": Case((missing, missing), None),
    "older, missing, newest": Case((older, missing, newest), NEWEST, (True, True, False)),
    "missing, damaged, older, newest": Case((missing, damaged, older, newest), NEWEST, (True, True, True, False)),
    "newest, older, both ordered back": Case((newest, older), OLDER, (False, False), (("--resume.step", "STEP"),) * 2),
    "newest, missing, one ordered back": Case(
        (newest, missing), OLDER, (False, True), (("--resume",), ("--resume.step", "STEP"))
    ),
    "newest, one that does not resume": Case((newest, missing), NEWEST, (False, True), (("--resume",), ())),
}
DAILY = "older, newest"


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case((older, newest), NEWEST, (True, False)), id=DAILY),
        *(pytest.param(case, id=name, marks=pytest.mark.soak) for name, case in CASES.items()),
    ],
)
def test_nodes_with_disks_of_their_own_begin_again_on_the_newest(tmp_path: Path, saved: Path, case: Case) -> None:
    step = None if case.which is None else steps_of(saved)[case.which]
    with nodes_of(tmp_path, len(case.disks)) as cluster:
        nodes = start(cluster, tmp_path, saved, case)
        until(cluster, lambda: all(node.events("joined") for node in nodes), "all are in")
        until(cluster, lambda: all(node.events("checkpoint_committed") for node in nodes), "all keep checkpoints")
        for node, fetches in zip(nodes, case.fetches or [False] * len(nodes), strict=True):
            resumed = node.events("resumed_from")
            said = [(event["step"], event["source"]) for event in resumed]
            assert said == ([] if step is None else [(step, "members" if fetches else "checkpoint")])
            assert node.events("checkpoint_committed")[0]["step"] > (step or 0)
            assert not node.events("newer_checkpoint"), "it was heard"
        assert len({node.events("joined")[0]["round"] for node in nodes}) == 1, "all of them found the run"
        assert not [event for node in nodes for event in node.events("checkpoint_incomplete")]


def start(cluster: LocalCluster, folder: Path, saved: Path, case: Case) -> list[NodeProcess]:
    """Start the nodes of a case, each once the one before it says what it waits for."""
    nodes: list[NodeProcess] = []
    for number, make in enumerate(case.disks):
        node_id = f"node{number}"
        given = case.arguments[number] if case.arguments else ("--resume",)
        step = "" if case.which is None else str(steps_of(saved)[case.which])
        arguments = [*disk(folder, node_id), *(step if argument == "STEP" else argument for argument in given)]
        make(saved, folder / node_id / RUN_ID)
        nodes.append(cluster.start(node_id, arguments=arguments))
        until(cluster, lambda: bool(nodes[-1].events("join_state")), "it is on its way in")
    return nodes


def ends_with(node: NodeProcess, code: int, sentence: str) -> None:
    assert node.wait(DEADLINE_S) == code, node.console_tail()
    assert sentence in node.console_tail(), node.console_tail()


@pytest.mark.soak
def test_no_new_run_begins_where_all_that_is_there_is_damaged(tmp_path: Path, saved: Path) -> None:
    with nodes_of(tmp_path, 2) as cluster:
        for node in start(cluster, tmp_path, saved, Case((only_damaged, missing), None)):
            ends_with(node, 1, "no node has a checkpoint that can be taken: node0")


@pytest.mark.soak
def test_folder_of_another_model_is_refused_and_the_others_go_on(tmp_path: Path, saved: Path) -> None:
    with nodes_of(tmp_path, 2) as cluster:
        good, bad = start(cluster, tmp_path, saved, Case((newest, foreign), NEWEST))
        ends_with(bad, 2, "holds checkpoints of another model under the same run.id")
        until(cluster, lambda: bool(good.events("checkpoint_committed")), "the other goes on")
        assert good.events("resumed_from")[0]["step"] == steps_of(saved)[NEWEST]


@pytest.mark.soak
def test_two_orders_to_go_back_are_refused_on_both(tmp_path: Path, saved: Path) -> None:
    first, second = (("--resume.step", str(step)) for step in steps_of(saved)[:2])
    case = Case((newest, newest), None, (), (first, second))
    with nodes_of(tmp_path, 2) as cluster:
        for node in start(cluster, tmp_path, saved, case):
            ends_with(node, 2, "give all of them one --resume.step")


@pytest.mark.soak
def test_run_that_began_without_the_newest_is_joined_with_a_word_and_an_order_goes_on_from_it(
    tmp_path: Path, saved: Path
) -> None:
    slow = ("--resume", "--elastic.start-nodes", "1", "--fault.inject", "inner@+0=TAKES1")
    with nodes_of(tmp_path, 1) as cluster:
        first, late = start(cluster, tmp_path, saved, Case((older, newest), None, (), (slow, slow)))
        until(cluster, lambda: bool(late.events("newer_checkpoint")), "it is in, and says so")
        (newer,) = late.events("newer_checkpoint")
        steps = steps_of(saved)
        assert newer["step"] == steps[NEWEST] > newer["at"] >= steps[OLDER]
        assert first.events("resumed_from")[0]["step"] == steps[OLDER]


@pytest.mark.soak
def test_new_run_refuses_a_node_with_checkpoints_of_the_earlier_one(tmp_path: Path, saved: Path) -> None:
    alone = ("--resume", "--elastic.start-nodes", "1")
    with nodes_of(tmp_path, 1) as cluster:
        first, late = start(cluster, tmp_path, saved, Case((missing, newest), None, (), (alone, alone)))
        ends_with(late, 2, "end that run and start its nodes again with --resume and elastic.start_nodes")
        assert first.is_running


@pytest.mark.soak
@pytest.mark.parametrize("shared", ["auto", "true"])
def test_nodes_with_one_folder_write_one_checkpoint_and_both_begin_on_it(tmp_path: Path, shared: str) -> None:
    arguments = (*disk(tmp_path, "nfs"), "--ckpt.shared", shared)
    with nodes_of(tmp_path, 2) as cluster:
        nodes = [cluster.start(arguments=arguments) for _ in range(2)]
        until(cluster, lambda: bool(nodes[0].events("checkpoint_committed")), "a checkpoint")
        assert nodes[1].events("checkpoint_share_written") and not nodes[1].events("checkpoints_apart")
        step = nodes[0].events("checkpoint_committed")[0]["step"]
        assert len(list((tmp_path / "nfs" / RUN_ID / folder_of(step) / "nodes").iterdir())) == 2
        for node in nodes:
            node.terminate()
        assert [node.wait(DEADLINE_S) for node in nodes] == [0, 0]
        again = [cluster.restart(node.node_id, arguments=[*arguments, "--resume"]) for node in nodes]
        until(cluster, lambda: all(node.events("resumed_from") for node in again), "both begin again")
        assert {(e["step"], e["has_inner"]) for node in again for e in node.events("resumed_from")} == {
            (again[0].events("resumed_from")[0]["step"], True)
        }


@pytest.mark.soak
def test_one_folder_that_was_asked_for_and_is_not_there_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with nodes_of(tmp_path, 1, "--ckpt.shared", "true") as cluster:
        first = cluster.start(arguments=disk(tmp_path, "a"))
        until(cluster, lambda: bool(first.events("joined")), "it is in")
        ends_with(cluster.start(arguments=disk(tmp_path, "b")), 2, "or set ckpt.shared to auto")
        assert first.is_running


@pytest.mark.soak
@pytest.mark.parametrize("first", [0, 1], ids=["drained first comes first", "drained last comes first"])
def test_orderly_end_and_the_same_command_with_resume_lose_no_step(tmp_path: Path, first: int) -> None:
    """The one that left first holds an older checkpoint; the store still shows the dead run."""
    with nodes_of(tmp_path, 2) as cluster:
        nodes = [cluster.start(arguments=disk(tmp_path, f"node{number}")) for number in range(2)]
        until(cluster, lambda: all(node.events("checkpoint_committed") for node in nodes), "both keep checkpoints")
        for node in nodes:
            node.terminate()
            assert node.wait(DEADLINE_S) == 0, node.console_tail()
        step = nodes[1].events("checkpoint_committed")[-1]["step"]
        order = (first, 1 - first)
        again = {
            number: cluster.restart(f"node{number}", arguments=[*disk(tmp_path, f"node{number}"), "--resume"])
            for number in order
        }
        until(cluster, lambda: all(node.events("resumed_from") for node in again.values()), "both begin again")
        assert [node.events("resumed_from")[-1]["step"] for node in again.values()] == [step, step]
