"""Nodes that can only dial out: behind different NATs, in namespaces, with no forwarded port. By hand: -m soak."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.faults.arena import TINY
from tests.faults.nat import NatNetwork, obstacle

from zeroband.elastic.membership.records import View
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster

DEADLINE_S = 120.0

pytestmark = [pytest.mark.soak, pytest.mark.skipif(bool(obstacle()), reason=obstacle() or "there is NAT here")]


class Run:
    """A run over a network with NATs, and what the store shows of it."""

    def __init__(self, net: NatNetwork, cluster: LocalCluster, store: RedisStore) -> None:
        self.net = net
        self.cluster = cluster
        self._store = store

    @property
    def view(self) -> View:
        return self._store.view(0)

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        pause_s, end_s = 0.1, time.monotonic() + DEADLINE_S
        while not is_so():
            if time.monotonic() > end_s:
                raise TimeoutError(f"not within {DEADLINE_S:g} s: {what}\n{self.view.peers}\n{self.cluster.describe()}")
            time.sleep(pause_s)

    def contributing(self) -> set[str]:
        committed = self.view.committed
        return set() if committed is None else {node_id_of_member(m) for m in committed.plan.contributors()}

    def newest(self) -> int:
        committed = self.view.committed
        return -1 if committed is None else committed.round

    def until_train(self, *nodes: str, rounds: int = 3) -> None:
        """Wait until exactly these nodes have trained for some rounds."""
        self.until(lambda: self.contributing() == set(nodes), f"{nodes} contribute, and nobody else")
        newest = self.newest()
        self.until(lambda: self.newest() >= newest + rounds, f"{rounds} rounds after {newest}")
        assert self.contributing() == set(nodes)

    def relays(self) -> dict[str, tuple[str, ...]]:
        """Through whom nodes are called."""
        peers = self.view.peers
        return {peers[m].node_id: tuple(map(node_id_of_member, peers[m].relays)) for m in self.view.alive if m in peers}

    def check(self) -> None:
        """Equal digests on all nodes, for each round."""
        digests: dict[int, set[str]] = {}
        for node in self.cluster.nodes.values():
            for event in node.events("round_committed"):
                digests.setdefault(event["round"], set()).add(event["digest"])
        assert len(digests) > 3 and all(len(found) == 1 for found in digests.values())


@contextmanager
def running(folder: Path, *, public: Sequence[str], homes: Sequence[str], symmetric: bool = False) -> Iterator[Run]:
    env = {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    arguments = (*TINY, "--data.cache-dir", str(folder / "cache"), "--fault.detect-s", "4")
    with NatNetwork(public=public, homes=homes, symmetric=symmetric) as net:
        nodes = (*public, *homes)
        cluster = LocalCluster(folder / "runs", arguments, nodes=len(nodes), env=env, network=net.network)
        with cluster:
            for node in nodes:
                cluster.start(node)
            assert cluster.redis is not None
            with closing(RedisStore(cluster.redis.local_url, cluster.run_id, retry_s=30.0)) as store:
                yield Run(net, cluster, store)


@pytest.mark.parametrize("symmetric", [False, True], ids=["cone", "symmetric"])
def test_two_of_three_behind_nats_train_one_is_lost_and_comes_back(tmp_path: Path, symmetric: bool) -> None:
    with running(tmp_path, public=["pub"], homes=["home0", "home1"], symmetric=symmetric) as run:
        run.until_train("pub", "home0", "home1")
        assert run.relays() == {"pub": (), "home0": ("pub",), "home1": ("pub",)}
        assert (run.net.router_address("home1") in run.net.talks_to("home0")) is not symmetric
        run.cluster.nodes["home0"].kill()
        run.until_train("pub", "home1")
        run.cluster.restart("home0")
        run.until_train("pub", "home0", "home1")
        run.check()


def test_one_of_two_behind_a_nat_trains_and_is_the_donor_of_a_joiner(tmp_path: Path) -> None:
    """When the only member that can be dialled is lost, a joiner that can be dialled passes its own call on."""
    with running(tmp_path, public=["pub"], homes=["home0"]) as run:
        run.until_train("pub", "home0")
        run.cluster.nodes["pub"].kill()
        run.until_train("home0")
        run.cluster.restart("pub")
        run.until_train("pub", "home0")
        run.check()


def test_another_member_takes_over_from_a_relay_that_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, public=["pub0", "pub1"], homes=["home0", "home1"]) as run:
        run.until_train("pub0", "pub1", "home0", "home1")
        lost = run.relays()["home1"][0]
        left = ({"pub0", "pub1"} - {lost}).pop()
        run.cluster.nodes[lost].kill()
        run.until_train(left, "home0", "home1")
        assert run.relays() == {left: (), "home0": (left,), "home1": (left,)}
        run.check()
