"""Runs that end, die or go back, and go on from their checkpoints: real processes, a real store, real files."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from tests.tiny_runs import TINY_RUN, ForkedCluster

from zeroband.node.shm import sweep
from zeroband.tools import ctl
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.data.audit import audit, read_left_out, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.slow]

DEADLINE_S = 120.0
TINY = (
    *(*TINY_RUN, "--optim.warmup-steps", "10"),
    *("--outer.type", "diloco", "--outer.inner-steps", "5", "--outer.optimizer.momentum-warmup-rounds", "20"),
    *("--fault.detect-s", "1", "--ckpt.every-rounds", "2", "--ckpt.keep-last", "100", "--ckpt.peer-wait-s", "2"),
)

_WITHOUT_OUTER = (*TINY[: TINY.index("--outer.type")], *TINY[TINY.index("--fault.detect-s") :])
ALONE = (*_WITHOUT_OUTER, "--ckpt.every-rounds", "4")
DDP = (*_WITHOUT_OUTER, "--outer.type", "ddp", "--ckpt.every-rounds", "10")


@contextmanager
def cluster_of(
    folder: Path, nodes: int, *more: str, base: Sequence[str] = TINY, alone: bool = False
) -> Iterator[LocalCluster]:
    arguments = (*base, *more, "--ckpt.path", str(folder / "ckpt"), "--data.cache-dir", str(folder / "cache"))
    (shm := folder / "shm").mkdir(parents=True)  # of its own, so that no trainer of another version sweeps it
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "ZERO_BAND_NODE__SHM_DIR": str(shm)}
    with ForkedCluster(folder / "runs", arguments, nodes=nodes, env=env, alone=alone) as cluster:
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
    ("outer", "saved"),
    [
        pytest.param((), 10, id="diloco"),
        pytest.param(("--model.n-layers", "2", "--ckpt.every-rounds", "4", *STREAMING), 15, id="streaming"),
        pytest.param(EAGER, 10, id="eager"),
    ],
)
def test_resumed_run_repeats_every_bit_twice_in_a_row(tmp_path: Path, outer: tuple[str, ...], saved: int) -> None:
    with cluster_of(tmp_path, 2, "--train.total-steps", str(saved + 50), *outer) as cluster:
        for _ in range(2):
            cluster.start()
        finish(cluster)
        first = {node_id: losses(node.metrics(), saved) for node_id, node in cluster.nodes.items()}
        assert all(set(of_node) == set(range(saved + 1, saved + 51)) for of_node in first.values())
        for _ in range(2):
            seen = {node_id: len(node.metrics()) for node_id, node in cluster.nodes.items()}
            start_again(cluster, "--resume.step", str(saved))
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


def learned(cluster: LocalCluster, last_steps: int = 30) -> float:
    """The training loss at the end, over the nodes that came so far."""
    records = [record for node in cluster.nodes.values() for record in node.metrics()]
    end = max(record["step"] for record in records)
    return fmean(record["train/loss"] for record in records if record["step"] > end - last_steps)


LEARNING = ("--train.total-steps", "300", "--optim.adamw.lr", "0.003", "--elastic.start-nodes")
SEEDS = (0, 1, 2)
NOISE = 4.303 * math.sqrt(1 + 1 / len(SEEDS))
"""Standard deviations of three runs around their mean within which 95 % of single further runs lie (Student's t)."""


def undisturbed(folder: Path, base: Sequence[str], seed: int) -> float:
    with cluster_of(folder, 2, *LEARNING, "2", "--run.seed", str(seed), base=base) as cluster:
        for _ in range(2):
            cluster.start()
        finish(cluster)
        return learned(cluster)


def killed_and_resumed(folder: Path, base: Sequence[str], after: int) -> float:
    """All of two nodes are killed half way, and so many go on from the checkpoint."""
    with cluster_of(folder, 2, *LEARNING, "2", "--run.seed", str(SEEDS[0]), base=base) as cluster:
        first, second = (cluster.start() for _ in range(2))
        until(cluster, lambda: any(e["step"] >= 150 for e in first.events("checkpoint_committed")), "half of it")
        for node in (first, second):
            node.kill()
        arguments = ["--resume", "--elastic.start-nodes", str(after)]
        others = [cluster.restart(f"node{n}", arguments=arguments) for n in range(min(after, 2))]
        others += [cluster.start(arguments=arguments) for _ in range(after - len(others))]
        for node in others:
            assert node.wait(DEADLINE_S) == 0, cluster.describe()
        resumed = [node.events("resumed_from") for node in others]
        assert len({event[0]["step"] for event in resumed}) == 1 and resumed[0][0]["step"] >= 150
        assert_exact(cluster)
        return learned(cluster)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("base", [TINY, DDP], ids=["diloco", "ddp"])
def test_run_that_was_killed_and_goes_on_with_other_nodes_learns_as_one_that_was_not(
    tmp_path: Path, base: Sequence[str]
) -> None:
    """Measured against the noise between seeds; `-s` shows it."""
    whole = [undisturbed(tmp_path / f"seed{seed}", base, seed) for seed in SEEDS]
    mean, noise = fmean(whole), NOISE * stdev(whole)
    print(f"\nundisturbed, seeds {SEEDS}: {', '.join(f'{loss:.4f}' for loss in whole)}")
    print(f"mean {mean:.4f}, standard deviation {stdev(whole):.4f}, noise of one run (95 %): +-{noise:.4f}")
    for after in (1, 3):
        loss = killed_and_resumed(tmp_path / f"after{after}", base, after)
        where = "inside" if abs(loss - mean) <= noise else "outside"
        print(f"killed, resumed on {after}: {loss:.4f}, {loss - mean:+.4f}, {where} the noise")
        assert loss - mean <= noise, "less was learned than by chance"
        assert loss == pytest.approx(whole[0], rel=0.05), "far from the run of the same seed"


@pytest.mark.soak
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
def test_run_whose_loss_spikes_goes_back_by_itself_and_stands_still_in_the_end(tmp_path: Path) -> None:
    """A learning rate that grows until no checkpoint helps."""
    more = ("--train.total-steps", "1000000", "--optim.warmup-steps", "200", "--optim.adamw.lr", "4")
    more += ("--optim.clip-norm", "none", "--elastic.start-nodes", "2", "--fault.inject", "inner@+0=TAKES0.03")
    with cluster_of(tmp_path, 2, *more, "--rollback.on-spike", "1.2", "--rollback.most", "1") as cluster:
        nodes = [cluster.start() for _ in range(2)]
        until(cluster, lambda: all(node.events("paused") for node in nodes), "it stands still")
        ordered = [event for node in nodes for event in node.events("rollback_ordered")]
        (given_up,) = [event for node in nodes for event in node.events("rollback_given_up")]
        backs = [
            [(e["round"], e["step"], e["digest"], e["skipped"]) for e in node.events("rolled_back")] for node in nodes
        ]
        assert backs[0] == backs[1] and [back[:2] for back in backs[0]] == [
            (e["round"] + 1, e["step"]) for e in ordered
        ]
        assert given_up["round"] > ordered[-1]["round"] and given_up["step"] == ordered[-1]["step"]
        assert all(back[3] for back in backs[0])
        assert audit(read_rounds(cluster.run_dir), read_left_out(cluster.run_dir)).is_exact
        assert not audit(read_rounds(cluster.run_dir)).is_exact


@pytest.mark.soak
def test_crashed_trainer_goes_on_with_what_was_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other node is there to give it the state, no checkpoint is read, and other nodes of the machine start."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    more = ("--train.total-steps", "30", "--ckpt.every-rounds", "1000", "--fault.inject", "inner@3=OOM")
    with cluster_of(tmp_path, 1, *more) as cluster:
        node = cluster.start(ranks=2)
        shm = node.spec.memory.parent
        until(cluster, lambda: sweep(shm) is None or bool(node.events("joined")[1:]), "it comes back")
        (recovered,) = node.events("recovered")
        known = {event["round"]: event["digest"] for event in node.events("round_committed")}
        assert (recovered["source"], recovered["round"], recovered["digest"]) == ("memory", 2, known[2])
        assert "asked" not in node.events("left")[0]["reason"], "torchrun sends SIGTERM to the rank that is left"
        finish(cluster)
        assert node.metrics()[-1]["step"] == 30
        assert_exact(cluster)
        assert not node.spec.memory.exists()


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_trainer_whose_ranks_are_killed_at_any_moment_goes_on_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its memory, or with a checkpoint where that was being changed."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    chance = random.Random(7)
    more = ("--train.total-steps", "1000000", "--elastic.start-timeout-s", "4")
    with cluster_of(tmp_path, 1, *more) as cluster:
        node = cluster.start(ranks=2)
        for crash in range(5):
            until(cluster, lambda crash=crash: len(node.events("joined")) > crash, "it is a member")
            rounds = len(node.events("round_committed"))
            until(cluster, lambda rounds=rounds: len(node.events("round_committed")) > rounds + 3, "rounds")
            time.sleep(chance.uniform(0.0, 0.5))
            node.signal_rank(crash % 2, signal.SIGKILL)
            until(cluster, lambda crash=crash: len(node.events("joined")) > crash + 1, "it comes back")
        sources = [e.get("source", "checkpoint") for e in node.events() if e["kind"] in ("recovered", "resumed_from")]
        assert len(sources) >= 5 and sources.count("memory") >= 3, sources
        assert_exact(cluster)


@pytest.mark.soak
def test_trainer_that_crashed_in_a_commit_goes_on_from_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict counts, nobody holds the round after it, and nobody asked for --resume."""
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    more = ("--train.total-steps", "40", "--elastic.start-timeout-s", "4", "--fault.inject", "committed@3=OOM")
    with cluster_of(tmp_path, 1, *more) as cluster:
        node = cluster.start(ranks=2)
        finish(cluster)
        assert [event["round"] for event in node.events("recovered")] == [2]
        (resumed,) = node.events("resumed_from")
        assert (resumed["step"], resumed["round"]) == (10, 4)
        assert node.metrics()[-1]["step"] == 40
        assert_exact(cluster)


@pytest.mark.soak
def test_node_that_trains_alone_goes_on_from_its_checkpoint_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")
    alone = [*ALONE, "--train.total-steps", "60", "--fault.inject", "inner@+0=TAKES0.1"]
    alone += ["--ckpt.path", str(tmp_path / "ckpt"), "--data.cache-dir", str(tmp_path / "cache")]
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with ForkedCluster(tmp_path / "runs", alone, nodes=1, alone=True, env=env) as cluster:
        node = cluster.start()
        until(cluster, lambda: bool(node.events("checkpoint_committed")), "a checkpoint")
        node.signal_rank(0, signal.SIGKILL)
        finish(cluster)
        (resumed,) = node.events("resumed_from")
        assert resumed["step"] >= 4 and resumed["has_inner"]
        assert [metric["step"] for metric in node.metrics()][-1] == 60


def test_node_that_trains_alone_repeats_every_bit(tmp_path: Path) -> None:
    alone = [*ALONE, "--train.total-steps", "12", "--resume", "--ckpt.path", str(tmp_path / "ckpt")]
    alone += ["--data.cache-dir", str(tmp_path / "cache")]
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with ForkedCluster(tmp_path / "runs", alone, nodes=1, alone=True, env=env) as cluster:
        node = cluster.start()
        finish(cluster)
        first, count = losses(node.metrics(), 4), len(node.metrics())
        again = cluster.restart(node.node_id, arguments=["--resume.step", "4"])
        finish(cluster)
        assert again.events("resumed_from")[-1]["has_inner"]
        assert losses(again.metrics()[count:], 0) == first
