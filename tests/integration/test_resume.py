"""Runs that end, die or go back, and go on from their checkpoints: real processes, a real store, real files."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from zeroband import ctl
from zeroband.cluster import LocalCluster
from zeroband.data.audit import audit, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.slow]

DEADLINE_S = 120.0
TINY = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64"),
    *("--data.seq-length", "32", "--data.hold-out", "0", "--data.source.type", "synthetic"),
    *("--data.source.documents", "200", "--train.dtype", "float32", "--train.threads", "1"),
    *("--train.batch-size", "4", "--train.micro-bs", "4", "--optim.warmup-steps", "10"),
    *("--outer.type", "diloco", "--outer.inner-steps", "5", "--outer.optimizer.momentum-warmup-rounds", "20"),
    *("--fault.detect-s", "1", "--ckpt.every-rounds", "2", "--ckpt.keep-last", "100", "--ckpt.peer-wait-s", "2"),
)


@contextmanager
def cluster_of(folder: Path, nodes: int, *more: str) -> Iterator[LocalCluster]:
    arguments = (*TINY, *more, "--ckpt.path", str(folder / "ckpt"), "--data.cache-dir", str(folder / "cache"))
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    with LocalCluster(folder / "runs", arguments, nodes=nodes, env=env) as cluster:
        yield cluster


def until(cluster: LocalCluster, is_so: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end_s, f"{what}\n{cluster.describe()}"
        time.sleep(0.05)


def finish(cluster: LocalCluster) -> None:
    cluster.wait(timeout_s=DEADLINE_S)
    assert [node.exit_code for node in cluster.nodes.values()] == [0] * len(cluster.nodes), cluster.describe()


def start_again(cluster: LocalCluster, *arguments: str) -> None:
    for node_id in list(cluster.nodes):
        cluster.restart(node_id, arguments=arguments)


def losses(records: Sequence[dict[str, Any]], after: int) -> dict[int, tuple[float, object]]:
    """Loss and digest by step; of a step that was made several times, the last."""
    return {r["step"]: (r["train/loss"], r.get("outer/digest")) for r in records if r["step"] > after}


def assert_exact(cluster: LocalCluster) -> None:
    result = audit(read_rounds(cluster.run_dir))
    assert result.is_exact, result


STREAMING = ("--outer.inner-steps", "10", "--outer.fragments", "2", "--outer.overlap", "2", "--outer.merge", "mix")
EAGER = ("--outer.overlap", "full", "--outer.merge", "eager", "--outer.optimizer.lr", "0.4")


@pytest.mark.soak
@pytest.mark.parametrize(
    "outer",
    [
        pytest.param((), id="diloco"),
        pytest.param(("--model.n-layers", "2", *STREAMING), id="streaming"),
        pytest.param(EAGER, id="eager"),
    ],
)
def test_resumed_run_repeats_every_bit_twice_in_a_row(tmp_path: Path, outer: tuple[str, ...]) -> None:
    with cluster_of(tmp_path, 2, "--train.total-steps", "60", *outer) as cluster:
        for _ in range(2):
            cluster.start()
        finish(cluster)
        first = {node_id: losses(node.metrics(), 10) for node_id, node in cluster.nodes.items()}
        assert all(set(of_node) == set(range(11, 61)) for of_node in first.values())
        for _ in range(2):
            seen = {node_id: len(node.metrics()) for node_id, node in cluster.nodes.items()}
            start_again(cluster, "--resume.step", "10")
            finish(cluster)
            for node_id, node in cluster.nodes.items():
                assert node.events("resumed_from")[-1]["has_inner"]
                assert losses(node.metrics()[seen[node_id] :], 0) == first[node_id]
        assert_exact(cluster)


@pytest.mark.soak
def test_run_that_was_killed_goes_on_with_other_nodes_and_an_empty_store(tmp_path: Path) -> None:
    with cluster_of(tmp_path, 2, "--train.total-steps", "1000000", "--fault.inject", "inner@+0=TAKES0.05") as cluster:
        for _ in range(2):
            cluster.start()
        first = cluster.nodes["node0"]
        until(cluster, lambda: len(first.events("checkpoint_committed")) >= 2, "two checkpoints")
        for node in cluster.nodes.values():
            node.kill()
        assert cluster.redis is not None
        cluster.redis.stop()
        cluster.redis.start(empty=True)
        for point in ("restoring", "restored"):  # nodes that die in the load leave nothing behind that binds others
            cluster.start(point, arguments=["--resume", "--fault.inject", f"{point}@0=SIGKILL"])
        until(cluster, lambda: not any(node.is_running for node in cluster.nodes.values()), "they die in the load")
        again = cluster.start(
            "other", ranks=2, arguments=["--resume", "--elastic.start-nodes", "1", "--comm.lanes", "2"]
        )
        until(cluster, lambda: len(again.events("round_committed")) > 3, "rounds after the resume")
        (resumed,) = again.events("resumed_from")
        saved = first.events("checkpoint_committed")[-1]["step"]
        assert resumed["step"] >= saved - 10 and resumed["round"] > 2 and not resumed["has_inner"]
        again.terminate()
        assert again.wait(DEADLINE_S) == 0
        assert_exact(cluster)


def test_last_node_that_is_asked_to_leave_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    more = ("--train.total-steps", "1000000", "--ckpt.every-rounds", "1000", "--resume")
    with cluster_of(tmp_path, 1, *more, "--fault.inject", "inner@+0=TAKES0.05") as cluster:
        node = cluster.start()
        until(cluster, lambda: len(node.events("round_committed")) > 3, "rounds")
        node.terminate()
        assert node.wait(DEADLINE_S) == 0, node.console_tail()
        rounds = node.events("round_committed")
        assert node.events("checkpoint_committed")[-1]["round"] == rounds[-1]["round"]
        again = cluster.restart(node.node_id)
        until(cluster, lambda: bool(again.events("resumed_from")), "it resumes")
        resumed = again.events("resumed_from")[-1]
        assert (resumed["step"], resumed["digest"]) == (rounds[-1]["progress"]["inner_step"], rounds[-1]["digest"])
        until(cluster, lambda: len(again.events("round_committed")) > len(rounds) + 2, "rounds after it")
        assert_exact(cluster)


@pytest.mark.soak
def test_operator_pauses_drains_and_rolls_back_a_run(tmp_path: Path) -> None:
    more = ("--train.total-steps", "1000000", "--fault.inject", "inner@+0=TAKES0.05")
    with cluster_of(tmp_path, 2, *more) as cluster:
        assert cluster.store_url is not None
        order = [
            *TINY,
            "--store.url",
            cluster.store_url,
            "--run.id",
            cluster.run_id,
            "--ckpt.path",
            str(tmp_path / "ckpt"),
        ]
        a, b = (cluster.start() for _ in range(2))
        until(cluster, lambda: len(a.events("checkpoint_committed")) >= 2, "two checkpoints")
        step = a.events("checkpoint_committed")[0]["step"]
        assert ctl.main(["rollback", "--step", str(step), *order]) == 0
        until(cluster, lambda: bool(a.events("rolled_back") and b.events("rolled_back")), "both go back")
        backs = [node.events("rolled_back")[0] for node in (a, b)]
        assert [(back["step"], back["has_inner"]) for back in backs] == [(step, True)] * 2
        assert backs[0]["round"] == backs[1]["round"] and backs[0]["digest"] == backs[1]["digest"]
        assert ctl.main(["rollback", "--step", "3", *order]) == 2
        assert ctl.main(["pause", *order]) == 0
        until(cluster, lambda: bool(a.events("paused") and b.events("paused")), "both wait")
        assert a.events("paused")[0]["round"] == b.events("paused")[0]["round"]
        assert ctl.main(["resume", *order]) == 0
        assert ctl.main(["drain", b.node_id, *order]) == 0
        assert b.wait(DEADLINE_S) == 0 and b.events("drained")
        rounds = len(a.events("round_committed"))
        until(cluster, lambda: len(a.events("round_committed")) > rounds + 2, "the other goes on")
        assert_exact(cluster)


@pytest.mark.soak
def test_crashed_trainer_goes_on_with_what_was_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other node is there to give it the state, and no checkpoint is read."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    more = ("--train.total-steps", "1000000", "--ckpt.every-rounds", "1000", "--fault.inject", "inner@+0=TAKES0.05")
    with cluster_of(tmp_path, 1, *more) as cluster:
        node = cluster.start(ranks=2)
        until(cluster, lambda: len(node.events("round_committed")) > 3, "rounds")
        node.signal_rank(1, signal.SIGKILL)
        until(cluster, lambda: bool(node.events("recovered")), "it comes back")
        (recovered,) = node.events("recovered")
        known = {event["round"]: event["digest"] for event in node.events("round_committed")}
        assert recovered["source"] == "memory" and recovered["digest"] == known[recovered["round"]]
        until(
            cluster, lambda: max(e["round"] for e in node.events("round_committed")) > recovered["round"] + 2, "rounds"
        )
        assert_exact(cluster)
        node.terminate()
        assert node.wait(DEADLINE_S) == 0
        assert not node.spec.memory.exists()


def test_node_that_trains_alone_repeats_every_bit(tmp_path: Path) -> None:
    start = TINY.index("--outer.type")
    alone = [*TINY[:start], *TINY[TINY.index("--fault.detect-s") :], "--train.total-steps", "12", "--resume"]
    alone += ["--ckpt.every-rounds", "4", "--ckpt.path", str(tmp_path / "ckpt")]
    alone += ["--data.cache-dir", str(tmp_path / "cache")]
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with LocalCluster(tmp_path / "runs", alone, nodes=1, alone=True, env=env) as cluster:
        node = cluster.start()
        finish(cluster)
        first, count = losses(node.metrics(), 4), len(node.metrics())
        again = cluster.restart(node.node_id, arguments=["--resume.step", "4"])
        finish(cluster)
        assert again.events("resumed_from")[-1]["has_inner"]
        assert losses(again.metrics()[count:], 0) == first
