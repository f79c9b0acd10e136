"""Runs whose way to the store is one that real runs have: TLS, an ACL user, a password by now, lost bytes, Sentinel.

One run of three nodes and one of two, started beside each other; each test lets something happen to one of them. What
happens to the store delays a run: no node ends, none is voted out, every sample is trained once.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError
from tests.certificates import write_authority, write_certificate
from tests.relay import Damage, Relay, Wound
from tests.servers import SERVERS, Servers, until
from tests.tiny_runs import ENDLESS, TINY_RUN, ForkedCluster

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.keys import ACL_RULES
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.slow]

DEADLINE_S = 180.0
PASSWORD, ADMIN = "s3cret", "root"
TINY = (
    *(*TINY_RUN, *ENDLESS, "--fault.detect-s", "4"),
    *("--outer.type", "diloco", "--outer.inner-steps", "2", "--fault.inject", "inner@+0=TAKES0.15"),
)
"""Rounds of about a third of a second, most of it sleep."""


@dataclass
class Run:
    """Nodes that train, and how to look at them from outside."""

    cluster: LocalCluster
    look: RedisStore
    members: dict[str, str] = field(default_factory=dict)
    """Member ids by node, as they were when all took part for the first time."""

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not is_so():
            ended = [node.node_id for node in self.cluster.nodes.values() if not node.is_running]
            assert not ended, f"{ended} ended; awaited: {what}\n{self.cluster.describe()}"
            assert time.monotonic() < end_s, f"not within {DEADLINE_S:g} s: {what}\n{self.cluster.describe()}"
            time.sleep(0.05)

    def newest(self) -> int:
        committed = self.look.view(0).committed
        return -1 if committed is None else committed.round

    def contributing(self) -> dict[str, str]:
        """Member ids by node of those whose update counted in the newest round."""
        committed = self.look.view(0).committed
        return {} if committed is None else {node_id_of_member(m): m for m in committed.plan.contributors()}

    def until_all_contribute(self) -> None:
        self.until(lambda: self.contributing().keys() == self.cluster.nodes.keys(), "all nodes contribute")
        self.members = self.contributing()

    def go_on(self) -> None:
        """Wait for rounds that begin from now on; the same members are in them."""
        newest = self.newest()
        self.until(lambda: self.newest() >= newest + 3, f"three rounds after round {newest}")
        assert self.contributing() == self.members, "somebody was voted out"

    def said(self, node_id: str, words: str) -> bool:
        return words in self.cluster.nodes[node_id].console.read_text(errors="replace")

    def until_said(self, words: str, *node_ids: str) -> None:
        nodes = node_ids or tuple(self.cluster.nodes)
        self.until(lambda: all(self.said(node, words) for node in nodes), f"{', '.join(nodes)} say: {words}")

    def end(self) -> None:
        """Wait for all nodes to leave; what they trained is exact, and equal after each round."""
        assert set(self.cluster.wait(timeout_s=DEADLINE_S).values()) == {0}, self.cluster.describe()
        digests: dict[int, set[str]] = {}
        for node in self.cluster.nodes.values():
            for event in node.events("round_committed"):
                digests.setdefault(event["round"], set()).add(event["digest"])
        assert len(digests) > 3 and all(len(found) == 1 for found in digests.values())
        result = audit(read_rounds(self.cluster.run_dir))
        assert result.trained and all(account.is_exact for account in result.accounts.values()), result


@dataclass
class Line:
    """A server with a user of its own for the run, and relays before it."""

    servers: Servers
    port: int
    relay: Relay
    """In the clear; where bytes are lost."""
    tls: Relay
    """Leads to the other relay."""
    admin: redis.Redis
    run: Run


@dataclass
class Watched:
    """A master with a replica, three Sentinels that watch them, and a run that asks those."""

    servers: Servers
    master: int
    sentinels: Sequence[int]
    run: Run


def _start(stack: ExitStack, folder: Path, urls: Sequence[str], look_url: str) -> Run:
    env = {"OMP_NUM_THREADS": "1", "ZERO_BAND_RUN__TOKEN": "sesame"}
    arguments = (*TINY, "--data.cache-dir", str(folder / "cache"))
    cluster = stack.enter_context(
        ForkedCluster(folder / "runs", arguments, nodes=len(urls), env=env, store_url=look_url)
    )
    for url in urls:
        cluster.start(env={"ZERO_BAND_STORE__URL": url})
    key = RunKey.of("sesame", cluster.run_id)
    look = stack.enter_context(closing(RedisStore(look_url, cluster.run_id, key=key, lease_s=4.0, retry_s=60.0)))
    return Run(cluster, look)


def _line(stack: ExitStack, folder: Path) -> Line:
    """Two nodes over TLS as an ACL user with exactly the rules of a run, one in the clear without a login."""
    servers = Servers(SERVERS[0].program, folder / "redis")
    stack.callback(servers.close)
    port = servers.start(file=f"user admin on >{ADMIN} ~* &* +@all\nuser run on >{PASSWORD} -@all {ACL_RULES}")
    authority = write_authority(folder)
    write_certificate(folder, "server", authority)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    relay = Relay(port)
    stack.callback(relay.close)
    tls = Relay(relay.port, tls=context)
    stack.callback(tls.close)
    admin = stack.enter_context(redis.Redis(port=port, username="admin", password=ADMIN))
    sealed = f"rediss://run:{PASSWORD}@127.0.0.1:{tls.port}?ssl_ca_certs={folder}/ca.pem"
    urls = (sealed, sealed, f"redis://127.0.0.1:{relay.port}")
    run = _start(stack, folder, urls, f"redis://admin:{ADMIN}@127.0.0.1:{port}")
    return Line(servers, port, relay, tls, admin, run)


def _watched(stack: ExitStack, folder: Path) -> Watched:
    servers = Servers(SERVERS[-1].program, folder / "redis")
    stack.callback(servers.close)
    master = servers.start("--repl-diskless-sync-delay", "0")
    replica = servers.start(file=f"replicaof 127.0.0.1 {master}")
    with redis.Redis(port=replica) as client:
        until(lambda: client.info("replication")["master_link_status"] == "up", "link")
    file = f"sentinel monitor main 127.0.0.1 {master} 2\nsentinel down-after-milliseconds main 1000\n"
    file += "sentinel failover-timeout main 5000\n"
    sentinels = [servers.start("--sentinel", file=file) for _ in range(3)]
    for port in sentinels:
        with redis.Redis(port=port) as watcher:
            until(lambda w=watcher: _knows(w.sentinel_master("main")), "Sentinel that knows the others")
    hosts = ",".join(f"127.0.0.1:{port}" for port in sentinels)
    url = f"redis+sentinel://{hosts}/main"
    return Watched(servers, master, sentinels, _start(stack, folder, (url, url), url))


def _knows(master: dict[str, int]) -> bool:
    return int(master["num-slaves"]) == 1 and int(master["num-other-sentinels"]) == 2


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Line]:
    with ExitStack() as stack:
        line = _line(stack, tmp_path_factory.mktemp("line"))
        line.run.until_all_contribute()
        yield line


def test_nodes_train_over_tls_as_a_user_that_may_do_no_more_than_a_run_needs(line: Line) -> None:
    assert {"run", "default"} <= {client["user"] for client in line.admin.client_list()}
    assert line.tls.requests > line.run.newest() > 0
    with redis.Redis(port=line.port, username="run", password=PASSWORD) as user:
        for forbidden in (lambda: user.set("another:a", 1), user.flushall, user.config_get):
            with pytest.raises(NoPermissionError):
                forbidden()
    line.run.go_on()


@pytest.mark.parametrize(
    ("of", "wound", "at"),
    [
        ("server", Wound.DROP, 0),
        ("server", Wound.DROP, 1),
        ("server", Wound.INSERT, 1),
        ("server", Wound.CHANGE, 0),
        ("server", Wound.CUT, 7),
        ("client", Wound.DROP, 0),
        ("client", Wound.DROP, 40),
        ("client", Wound.CUT, 30),
    ],
)
def test_run_goes_on_after_a_byte_of_its_line_was_lost(line: Line, of: str, wound: Wound, at: int) -> None:
    damage = line.relay.damage = Damage(wound, at, of)
    line.run.until(lambda: damage.done, str(damage))
    line.run.go_on()


def test_run_goes_on_over_a_line_that_hangs_for_a_moment(line: Line) -> None:
    before = line.relay.requests
    line.relay.delay_s = 0.3
    line.run.until(lambda: line.relay.requests > before + 5, "calls over a slow line")
    line.relay.delay_s = 0.0
    line.run.go_on()


def test_run_waits_while_the_store_lets_nobody_in(line: Line) -> None:
    """A password is switched on, the user of the others loses its rules; later both are as they were."""
    line.admin.config_set("requirepass", "another")
    line.admin.execute_command("ACL", "SETUSER", "run", "-@all")
    line.relay.cut()
    line.run.until_said("Redis refuses")
    line.run.until_said("unauthenticated multibulk length", "node2")
    line.admin.execute_command("ACL", "SETUSER", "default", "nopass")
    line.admin.execute_command("ACL", "SETUSER", "run", *ACL_RULES.split())
    line.run.go_on()


def test_what_was_trained_is_exact_and_equal_whatever_happened_to_the_store(line: Line) -> None:
    end(line.run)


@pytest.mark.soak
def test_run_goes_on_at_another_master_and_trains_each_sample_once(tmp_path: Path) -> None:
    with ExitStack() as stack:
        watched = _watched(stack, tmp_path)
        watched.run.until_all_contribute()
        watched.servers.kill(watched.master)
        with redis.Redis(port=watched.sentinels[0]) as sentinel:
            until(lambda: int(sentinel.sentinel_get_master_addr_by_name("main")[1]) != watched.master, "other master")
        watched.run.go_on()
        end(watched.run)


def end(run: Run) -> None:
    for node in run.cluster.running:
        node.terminate()
    run.end()
