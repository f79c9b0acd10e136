"""A node that has the token lies: it is named and put out; the others lose no inner step, and none of them leaves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from tests.faults.arena import TINY
from tests.tiny_runs import ForkedCluster

from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.cluster.node_process import NodeProcess

DEADLINE_S = 120.0
HONEST, LIAR = ("node0", "node2", "node3"), "node1"
INNER_STEPS = 5
PLAIN = ("--comm.encryption", "false", "--fault.detect-s", "1")

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def rounds_of(nodes: Sequence[NodeProcess]) -> dict[int, list[dict[str, Any]]]:
    """What nodes recorded of each committed round."""
    rounds: dict[int, list[dict[str, Any]]] = {}
    for node in nodes:
        for event in node.events("round_committed"):
            rounds.setdefault(event["round"], []).append(event)
    return rounds


def newest(nodes: Sequence[NodeProcess]) -> int:
    return min(max((e["round"] for e in node.events("round_committed")), default=0) for node in nodes)


def blamed(node: NodeProcess, consequence: str) -> list[tuple[str, ...]]:
    events = [event for event in node.events("blamed") if event["consequence"] == consequence]
    return [tuple(sorted(map(node_id_of_member, event["member_ids"]))) for event in events]


def lie(
    cluster: LocalCluster, how: str, to: Sequence[str], sites: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[NodeProcess], NodeProcess]:
    """Start four nodes of which LIAR lies from round 3 on."""
    for node_id in ("node0", "node1", "node2", "node3"):
        env = {"LIES": how, "LIES_TO": " ".join(to)} if node_id == LIAR else {}
        more = ["--node.site", sites[node_id]] if node_id in sites else []
        cluster.start(node_id, env=env, arguments=more)
    return [cluster.nodes[node_id] for node_id in HONEST], cluster.nodes[LIAR]


def a_cluster(folder: Path, more: Sequence[str] = ()) -> LocalCluster:
    arguments = (*TINY, *PLAIN, "--data.cache-dir", str(folder / "cache"), *more)
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    return ForkedCluster(folder / "runs", arguments, nodes=4, env=env, script=Path(__file__).with_name("liar.py"))


def assert_honest_nodes_lost_nothing(honest: Sequence[NodeProcess]) -> None:
    """They are members from the founding on, hold the same state, and each round counts whole phases of each.

    A node that a round left out trains on, so that its next round counts more than one phase.
    """
    assert all(node.is_running and not node.events("fenced") for node in honest)
    before = dict[str, int]()
    for round, events in sorted(rounds_of(honest).items()):
        assert len({event["digest"] for event in events}) == 1
        counted = dict(zip(events[0]["members"], events[0]["samples"], strict=True)) if round else {}
        for member, samples in counted.items():
            phases, rest = divmod(samples, INNER_STEPS * 4)
            assert rest == 0
            assert phases <= max(1, round - before.get(member, round))
            if phases:
                before[member] = round


@pytest.mark.parametrize(
    ("how", "to"),
    [
        ("bytes", HONEST),
        pytest.param("withhold", HONEST, marks=pytest.mark.soak),
        pytest.param("withhold mean", HONEST, marks=pytest.mark.soak),
        pytest.param("vote", (), marks=pytest.mark.soak),
        pytest.param("nan", HONEST, marks=pytest.mark.soak),
    ],
)
def test_who_lies_to_all_is_named_by_all_and_put_out(tmp_path: Path, how: str, to: Sequence[str]) -> None:
    with a_cluster(tmp_path) as cluster:
        honest, liar = lie(cluster, how, to)
        cluster.wait_until(lambda _: all((LIAR,) in blamed(node, "out") for node in honest), timeout_s=DEADLINE_S)
        before = newest(honest)
        cluster.wait_until(lambda _: newest(honest) >= before + 3, timeout_s=DEADLINE_S)
        assert all(set(blamed(node, "out")) == {(LIAR,)} for node in honest)
        assert_honest_nodes_lost_nothing(honest)
        if not how.startswith("withhold"):  # a bad network does that, too: such a node may try once more
            cluster.wait_until(lambda _: not liar.is_running, timeout_s=DEADLINE_S)
            assert f"{LIAR} was put out of the run" in liar.console_tail()


@pytest.mark.soak
@pytest.mark.parametrize(
    "way",
    [(), ("--outer.robust.type", "centered_clip", "--comm.sites", "off"), ("--outer.overlap", "full")],
    ids=["mean", "robust", "overlap"],
)
def test_owner_that_adds_one_percent_for_all_alike_is_found_by_the_audit(tmp_path: Path, way: tuple[str, ...]) -> None:
    """Its bytes are the same everywhere, and so is its vote."""
    size = ("--model.d-model", "192", "--model.n-layers", "4", "--model.d-ff", "768", "--comm.chunk-mb", "0.25")
    with a_cluster(tmp_path, ("--comm.codec", "fp32", *size, *way)) as cluster:  # smaller ones are audited rarely
        honest, liar = lie(cluster, "sum", HONEST)
        cluster.wait_until(lambda _: all((LIAR,) in blamed(node, "out") for node in honest), timeout_s=DEADLINE_S)
        before = newest(honest)
        cluster.wait_until(lambda _: newest(honest) >= before + 3, timeout_s=DEADLINE_S)
        assert all(set(blamed(node, "out")) == {(LIAR,)} and not blamed(node, "apart") for node in honest)
        assert before < 40, "half of the rounds are audited, by 4 who draw from 4 shards: 99 of 100 such runs end in 16"
        assert_honest_nodes_lost_nothing(honest)
        cluster.wait_until(lambda _: not liar.is_running, timeout_s=DEADLINE_S)


WAYS = {
    "int4": ("--comm.codec", "int4"),
    "beside training": ("--outer.overlap", "full"),
    "fragments": ("--outer.fragments", "2", "--outer.inner-steps", "4", "--model.n-layers", "2"),
    "payloads": ("--outer.type", "sparseloco"),
    "sites": (),
}


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_liar_is_found_however_rounds_travel(tmp_path: Path, way: str) -> None:
    """At sites the first attempt tells nothing, since parts pass through others; the next one is flat."""
    with a_cluster(tmp_path, WAYS[way]) as cluster:
        # alone in its site, the liar speaks for it: what it says as another one's mate is not changed here
        sites = {"node0": "a", "node2": "a", "node3": "b", LIAR: "c"} if way == "sites" else {}
        honest, _ = lie(cluster, "bytes", HONEST, sites)
        cluster.wait_until(lambda _: all((LIAR,) in blamed(node, "out") for node in honest), timeout_s=DEADLINE_S)
        before = newest(honest)
        cluster.wait_until(lambda _: newest(honest) >= before + 3, timeout_s=DEADLINE_S)
        assert all(set(blamed(node, "out")) == {(LIAR,)} for node in honest)
        assert all(node.is_running and not node.events("fenced") for node in honest)
        assert all(len({event["digest"] for event in events}) == 1 for events in rounds_of(honest).values())


@pytest.mark.soak
@pytest.mark.parametrize("how", ["bytes", "withhold", "nan"])
def test_who_lies_to_one_takes_turns_with_it_until_it_lies_to_another(tmp_path: Path, how: str) -> None:
    """Word stands against word, so neither is put out: they are not in one round any more, and the run goes on."""
    with a_cluster(tmp_path) as cluster:
        honest, _ = lie(cluster, how, ["node2"])
        cluster.wait_until(lambda _: all(blamed(node, "apart") for node in honest), timeout_s=DEADLINE_S)
        before = newest(honest)
        cluster.wait_until(lambda _: newest(honest) >= before + 6, timeout_s=DEADLINE_S)
        assert all(set(blamed(node, "apart")) == {(LIAR, "node2")} for node in honest)
        assert not any(blamed(node, "out") for node in honest)
        assert_honest_nodes_lost_nothing(honest)
        together = [
            {LIAR, "node2"} <= set(map(node_id_of_member, events[0]["members"]))
            for round, events in rounds_of(honest).items()
            if before < round <= before + 6
        ]
        assert not any(together)
