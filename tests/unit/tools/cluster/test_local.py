from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import redis

from zeroband.errors import ConfigError
from zeroband.tools.cluster import STORE, LocalCluster, Network, RedisServer
from zeroband.tools.cluster.local import asked_run, without_secrets

DEADLINE_S = 60.0

STAND_IN = """
import os, time
import redis
with redis.Redis.from_url(os.environ["ZERO_BAND_STORE__URL"]) as store:
    store.rpush("up", os.environ["ZERO_BAND_NODE__ADVERTISE_HOST"] + " " + os.readlink("/proc/self/ns/net"))
time.sleep(60)
"""


def test_environment_of_nodes_without_a_network_names_no_host_and_the_store_of_this_machine(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, nodes=1) as cluster:
        assert cluster.redis is not None
        env = cluster.environment("node0", 1)
        assert env["ZERO_BAND_STORE__URL"] == cluster.store_url == cluster.redis.local_url
        assert "ZERO_BAND_NODE__ADVERTISE_HOST" not in env


def test_environment_of_nodes_of_a_network_names_their_address_and_that_of_the_store(
    tmp_path: Path, network: Network
) -> None:
    with LocalCluster(tmp_path, nodes=2, network=network) as cluster:
        env = cluster.environment("node1", 1)
        assert env["ZERO_BAND_NODE__ADVERTISE_HOST"] == network.address("node1")
        assert env["ZERO_BAND_STORE__URL"] == f"redis://{network.address(STORE)}:6379"
        assert cluster.redis is not None
        with redis.Redis.from_url(cluster.redis.local_url) as client:
            assert client.ping()


def test_cluster_starts_and_ends_the_server_that_it_is_given(tmp_path: Path) -> None:
    server = RedisServer(persistent=True)
    with LocalCluster(tmp_path, nodes=1, redis=server) as cluster:
        assert cluster.redis is server
        with redis.Redis.from_url(cluster.environment("node0", 1)["ZERO_BAND_STORE__URL"]) as client:
            assert client.config_get("appendonly") == {"appendonly": "yes"}
    assert not Path(server.local_url.removeprefix("unix://")).parent.exists()


@pytest.mark.slow
def test_cluster_runs_each_node_in_its_own_namespace_and_again_in_the_same(tmp_path: Path, network: Network) -> None:
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    with LocalCluster(tmp_path / "runs", nodes=2, script=script, network=network) as cluster:
        assert cluster.redis is not None
        nodes = [cluster.start(), cluster.start()]
        with redis.Redis.from_url(cluster.redis.local_url, socket_timeout=None) as client:
            first = {_next_up(client) for _ in nodes}
            assert {host for host, _ in first} == {network.address("node0"), network.address("node1")}
            assert len({namespace for _, namespace in first} | {str(Path("/proc/self/ns/net").readlink())}) == 3
            assert [len(node.rank_pids) for node in nodes] == [1, 1]
            nodes[0].kill()
            assert nodes[0].pids == ()
            cluster.restart("node0")
            assert _next_up(client) in first


def _next_up(client: redis.Redis) -> tuple[str, str]:
    found = client.blpop(["up"], timeout=DEADLINE_S)
    assert found is not None, "no node is up"
    host, namespace = found[1].decode().split()
    return host, namespace


# -- what a command is asked to start; secrets leave the command line on the way to the nodes --------------------------


@pytest.mark.parametrize(
    "token", [("--run.token", "s3cret"), ("--run.token=s3cret",), ("--run.token=s3cret", "--train.compile")]
)
def test_secrets_of_a_node_go_into_its_environment(token: Sequence[str]) -> None:
    kept, secrets = without_secrets(("@a.toml", *token, "--store.url=redis://:p@h", "--run.id", "x"))
    assert kept == ("@a.toml", *token[2 if token[0] == "--run.token" else 1 :], "--run.id", "x")
    assert secrets == {"ZERO_BAND_RUN__TOKEN": "s3cret", "ZERO_BAND_STORE__URL": "redis://:p@h"}


def test_arguments_without_secrets_stay_as_they_are() -> None:
    arguments = ("@a.toml", "--run.token-file", "t", "--run.token_file=t", "--data.source.paths", "--run.token")
    assert without_secrets(arguments) == (arguments, {})


def test_each_start_without_a_run_id_is_a_run_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ZERO_BAND_RUN__ID", raising=False)
    names = {asked_run([])[1] for _ in range(20)}
    assert len(names) > 15
    assert asked_run([], "chaos")[1].startswith("chaos-2")
    assert asked_run(["--run.id", "mine"], "chaos")[1] == "mine"


def test_auto_is_refused_where_the_command_names_its_run() -> None:
    with pytest.raises(ConfigError, match="generates a name by default"):
        asked_run(["--run.id", "auto"])
