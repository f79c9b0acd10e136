"""Runs of which every process is killed at once, the store left alone, and the same commands again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.tiny_runs import DEADLINE_S, ENDLESS, TINY_RUN, ForkedCluster, until

from zeroband.tools.cluster import LocalCluster
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.soak]

TINY = (
    *TINY_RUN,
    *ENDLESS,
    *("--outer.type", "diloco", "--outer.inner-steps", "5", "--fault.inject", "inner@+0=TAKES0.05"),
    *("--fault.detect-s", "1", "--ckpt.every-rounds", "2"),
)
"""Waits for members and founders are as long as they are by default."""


@contextmanager
def cluster_of(folder: Path) -> Iterator[LocalCluster]:
    arguments = (*TINY, "--data.cache-dir", str(folder / "cache"))
    (shm := folder / "shm").mkdir()
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder), "ZERO_BAND_NODE__SHM_DIR": str(shm)}
    with ForkedCluster(folder / "runs", arguments, nodes=1, env=env) as cluster:
        yield cluster


def test_run_with_checkpoints_goes_on_by_itself_but_never_without_a_member_that_lives(tmp_path: Path) -> None:
    saves = ["--ckpt.path", str(tmp_path), "--elastic.start-nodes"]
    with cluster_of(tmp_path) as cluster:
        first = cluster.start("first", arguments=[*saves, "1"])
        until(cluster, lambda: len(first.events("checkpoint_committed")) > 0, "a checkpoint")
        first.pause()  # it keeps neither its lease nor a word from the others, and yet it lives
        second = cluster.start("second", arguments=[*saves, "1"])
        until(cluster, lambda: "without a lease answers" in second.console_tail(), "it finds the first one alive")
        assert second.events("run_abandoned")[0]["members"] == [first.events("joined")[0]["member_id"]]
        first.resume()
        until(cluster, lambda: len(second.events("checkpoint_share_written")) > 0, "they save together")
        assert not second.events("resumed_from")
        for node in (first, second):
            node.kill()
        last = max(event["round"] for event in first.events("round_committed"))

        first, second = (cluster.restart(node_id, arguments=[*saves, "2"]) for node_id in ("first", "second"))
        third = cluster.start("third")  # it has no ckpt.path
        nodes = (first, second, third)
        until(cluster, lambda: any(len(e["members"]) == 3 for e in third.events("round_committed")), "all three train")
        resumed = [node.events("resumed_from") for node in nodes]
        assert [len(events) for events in resumed] == [1, 1, 0]
        (one,), (other,) = resumed[:2]
        assert (one["round"], one["step"], one["digest"]) == (other["round"], other["step"], other["digest"])
        assert one["round"] > last
        digests: dict[int, set[str]] = {}
        for event in (event for node in nodes for event in node.events("round_committed")):
            digests.setdefault(event["round"], set()).add(event["digest"])
        assert {round: found for round, found in digests.items() if len(found) > 1} == {}
        assert audit(read_rounds(cluster.run_dir)).is_exact


def test_run_without_checkpoints_is_given_up_at_once_with_the_way_out(tmp_path: Path) -> None:
    with cluster_of(tmp_path) as cluster:
        node = cluster.start()
        until(cluster, lambda: len(node.events("round_committed")) > 2, "rounds")
        node.kill()
        again = cluster.restart(node.node_id)
        assert again.wait(DEADLINE_S) == 1, cluster.describe()
        (abandoned,) = again.events("run_abandoned")
        assert abandoned["members"] == [node.events("joined")[0]["member_id"]]
        assert abandoned["wait_s"] > 0 and "no ckpt.path" in abandoned["then"] and "--resume" in abandoned["type"]
        failure = again.events("run_failed")[0]["error"]
        assert "no member of this run has held a lease" in failure and "another --run.id" in failure
        assert "came no further" not in failure, "it has waited as for members that live"
