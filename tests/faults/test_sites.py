"""A site loses in the middle of a transfer who speaks for it, or passes on what others send: no sample is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster, Network
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.soak, pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S, STRUCK_ROUND, ROUNDS = 240.0, 4, 9
SITE_OF = {"node0": "x", "node1": "y", "node2": "x", "node3": "y"}
TASK = (
    *("--model.d-model", "384", "--model.n-layers", "2", "--model.n-heads", "4", "--model.tie-embeddings"),
    *("--data.seq-length", "32", "--train.batch-size", "2", "--train.micro-bs", "2", "--train.dtype", "float32"),
    *("--train.threads", "1", "--outer.inner-steps", "4", "--log-level", "WARNING"),
    *(f"--train.total-steps={ROUNDS * 4 * len(SITE_OF)}", "--fault.inject", "inner@+0=TAKES0.1"),
)


EACH_OUTER = pytest.mark.parametrize(
    ("outer", "mbit"),
    [(("--outer.type", "diloco"), 10.0), (("--outer.type", "sparseloco", "--outer.k", "512"), 5.0)],
    ids=["diloco", "sparseloco"],
)
"""Each node sends payloads through a member of the other site, so who speaks for its site also passes some on."""


def speaker_of(plan: RoundPlan, site: str) -> str:
    found = {node_id_of_member(m): node_id_of_member(s) for m, s in plan.speakers().items()}
    (speaker,) = {found[node] for node, own in SITE_OF.items() if node in found and own == site}
    return speaker


def undisturbed(run_dir: Path, nodes: Iterable[str]) -> list[dict[str, Any]]:
    """Lines of metrics of rounds with payloads of all nodes, that nothing disturbed."""
    text = "".join((run_dir / node / "metrics.jsonl").read_text(encoding="utf-8") for node in nodes)
    lines = [line for line in map(json.loads, text.splitlines()) if line.get("outer/payload_bytes")]
    return [line for line in lines if line["outer/nodes"] == len(SITE_OF) and not line["outer/retries"]]


@EACH_OUTER
@pytest.mark.skipif(Network.obstacle() != "", reason=Network.obstacle())
def test_lost_speaker_is_replaced_and_no_sample_is_lost(tmp_path: Path, outer: tuple[str, ...], mbit: float) -> None:
    with (
        Network() as network,
        LocalCluster(
            tmp_path, (*TASK, *outer), nodes=len(SITE_OF), env={"OMP_NUM_THREADS": "1"}, network=network
        ) as cluster,
    ):
        for node, site in SITE_OF.items():
            network.settle(node, site, mbit)
            cluster.start(node, arguments=[f"--node.site={site}"])
        assert cluster.redis is not None
        with closing(RedisStore(cluster.redis.local_url, cluster.run_id, retry_s=30.0)) as store:
            end_s, victim, after = time.monotonic() + DEADLINE_S, "", None
            while after is None:
                assert time.monotonic() < end_s, cluster.describe()
                view = store.view(0)
                plan, committed = view.plan, view.committed
                if plan is not None and plan.round == STRUCK_ROUND and not victim:
                    assert len(plan.members) == len(SITE_OF)
                    victim = speaker_of(plan, "x")
                    time.sleep(1.0)  # of the 4 s and more that the transfer takes
                    seen = store.view(0)
                    assert seen.committed is not None and seen.committed.round < STRUCK_ROUND, "it was over before"
                    cluster.nodes[victim].kill()
                if victim and committed is not None and committed.round >= STRUCK_ROUND:
                    after = committed
                time.sleep(0.02)
        assert after.round == STRUCK_ROUND
        left = {node for node in SITE_OF if node != victim}
        assert {node_id_of_member(member) for member in after.members} == left
        assert speaker_of(after.plan, "x") in left
        codes = cluster.wait(timeout_s=DEADLINE_S)
        assert {codes[node] for node in left} == {0}, cluster.describe()
        assert audit(read_rounds(cluster.run_dir)).is_exact
        payloads = undisturbed(cluster.run_dir, left)
        assert bool(payloads) == ("sparseloco" in outer)
        for line in payloads:  # its own to the other site and to who is near, and there what came from away
            wide, sent, payload = (line[f"outer/{name}_bytes"] for name in ("wide", "sent", "payload"))
            assert (wide, sent) == (payload, 3 * payload), line["outer/round"]
