"""Stores that answer and refuse what a run asks of them, on real servers: said within seconds, not waited for.

Once a run was seen to work with a store, the same refusals may pass, and are waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
from tests.servers import NO_SCRIPTS, until

from zeroband.elastic.store import redis_run
from zeroband.elastic.store.keys import ACL_RULES, COMMANDS, KEY_PATTERN
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, StoreLost
from zeroband.tools import ctl, join, status

Launch = Callable[..., int]
Open = Callable[..., RedisStore]

LONG_S = 600.0
"""Longer than any test waits."""


@pytest.fixture(scope="module")
def port(launch: Launch) -> int:
    """Address of a usable server."""
    return launch()


@pytest.fixture(scope="module")
def without_scripts(launch: Launch) -> int:
    return launch(*NO_SCRIPTS)


@pytest.fixture
def admin(port: int) -> Iterator[redis.Redis]:
    with redis.Redis(port=port) as client:
        yield client


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """`opened(*addresses)`: a store with one or several addresses, closed at the end; errors are soon permanent."""
    monkeypatch.setattr(redis_run, "REFUSES_S", 0.1)
    with contextlib.ExitStack() as stack:

        def one(*addresses: str | int, retry_s: float = LONG_S) -> RedisStore:
            urls = [f"redis://127.0.0.1:{address}" if isinstance(address, int) else address for address in addresses]
            return stack.enter_context(contextlib.closing(RedisStore(" ".join(urls), "run", retry_s=retry_s)))

        yield one


def _refusal(store: RedisStore) -> str:
    with pytest.raises(ConfigError) as refused:
        store.reach(retry_s=LONG_S)
    return str(refused.value)


def test_store_that_serves_is_left_as_it_was(port: int, opened: Open, admin: redis.Redis) -> None:
    opened(port).reach(retry_s=LONG_S)
    assert admin.keys() == []


@pytest.mark.parametrize("command", COMMANDS)
def test_user_without_one_command_is_refused_by_its_name(
    port: int, opened: Open, admin: redis.Redis, command: str
) -> None:
    """Any command, before it is needed."""
    rules = [rule for rule in ACL_RULES.split() if rule != f"+{command}"]
    admin.execute_command("ACL", "SETUSER", "run", "reset", "on", "nopass", "-@all", *rules)
    message = _refusal(opened(f"redis://run:any@127.0.0.1:{port}/1"))
    assert command.partition("|")[0] in message.partition("its rules must hold")[0].lower() and ACL_RULES in message
    assert admin.keys() == []


@pytest.mark.parametrize("pattern", ["another:*", "zeroband:{another}:*"])
def test_user_of_other_keys_is_refused(port: int, opened: Open, admin: redis.Redis, pattern: str) -> None:
    rules = ACL_RULES.replace(KEY_PATTERN, pattern).split()
    admin.execute_command("ACL", "SETUSER", "run", "reset", "on", "nopass", "-@all", *rules)
    assert "its rules must hold" in _refusal(opened(f"redis://run:any@127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (NO_SCRIPTS, "no Redis that a run can use (unknown command"),
        (("--rename-command", "SCRIPT", ""), "no Redis that a run can use (unknown command"),
        (("--rename-command", "ZADD", ""), "[ZADD]"),
        (("--replicaof", "127.0.0.1", "1"), "it is a replica: name its master"),
        (("--maxmemory", "1"), "its memory is full: raise its maxmemory"),
        (("--min-replicas-to-write", "1"), "too few of its replicas are there"),
        (("--cluster-enabled", "yes"), "node of a Redis Cluster"),
    ],
    ids=["no scripts", "no loading", "no ZADD", "replica", "memory", "replicas", "cluster"],
)
def test_unusable_server_is_refused_with_a_remedy(
    launch: Launch, opened: Open, settings: tuple[str, ...], why: str
) -> None:
    message = _refusal(opened(launch(*settings)))
    assert why in message and message.startswith("store.url: ") and "f_" not in message


def test_node_of_a_cluster_that_has_other_slots_is_refused(launch: Launch, opened: Open) -> None:
    port = launch("--cluster-enabled", "yes")
    with redis.Redis(port=port) as client:
        slot = client.execute_command("CLUSTER", "KEYSLOT", "{run}")
        client.execute_command("CLUSTER", "ADDSLOTS", (int(slot) + 1) % 16384)
    assert "node of a Redis Cluster" in _refusal(opened(port))


def test_server_that_cannot_save_is_refused(launch: Launch, opened: Open) -> None:
    port = launch()
    with redis.Redis(port=port) as client:
        client.config_set("save", "1000 1000")
        (Path(client.config_get("dir")["dir"]) / "dump.rdb").mkdir()
        client.bgsave()
        until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err", "failure to save")
    assert "it cannot save to its disk" in _refusal(opened(port))


# -- where it is asked for ---------------------------------------------------------------------------------------------


def test_refusal_is_retried_after_the_self_test(port: int, opened: Open, admin: redis.Redis) -> None:
    admin.execute_command("ACL", "SETUSER", "run", "reset", "on", "nopass", "-@all", *ACL_RULES.split())
    store = opened(f"redis://run:any@127.0.0.1:{port}", retry_s=0.3)
    store.reach(retry_s=LONG_S)
    admin.execute_command("ACL", "SETUSER", "run", "-evalsha")
    with pytest.raises(StoreLost, match=r"Redis refused for 0\.3 s: store\.url: Redis does not let this user"):
        store.view(0)
    admin.execute_command("ACL", "SETUSER", "run", "+evalsha")
    assert store.view(0).alive == frozenset()


def test_tool_is_refused_at_once(port: int, without_scripts: int, opened: Open) -> None:
    """Its first command is no script, and is answered."""
    store = opened(without_scripts)
    store.find_run()
    with pytest.raises(ConfigError, match="unknown command"):
        store.require_token()


@pytest.mark.parametrize(
    "tool",
    [
        lambda url: ctl.main(["status", "--outer.type", "ddp", "--run.id", "run", "--store.url", url]),
        lambda url: join.main([url, "--run.id", "run"]),
        lambda url: status.main(["--store", url, "--run-id", "run"]),
    ],
    ids=["ctl", "join", "status"],
)
def test_tools_say_what_a_store_refuses(
    without_scripts: int, capsys: pytest.CaptureFixture[str], tool: Callable[[str], int]
) -> None:
    assert tool(f"redis://127.0.0.1:{without_scripts}") == 2
    assert "no Redis that a run can use (unknown command" in capsys.readouterr().err


def test_one_of_several_stores_that_refuses_is_named_before_a_run_begins(
    port: int, without_scripts: int, opened: Open
) -> None:
    message = _refusal(opened(port, without_scripts))
    assert message.startswith(f"redis://127.0.0.1:{without_scripts}") and "unknown command" in message


def test_unusable_spare_store_is_logged(
    launch: Launch, opened: Open, admin: redis.Redis, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers probes while another one is in use."""
    other = launch()
    urls = [f"redis://127.0.0.1:{port}", f"redis://run:any@127.0.0.1:{other}"]
    with redis.Redis(port=other) as its_admin:
        its_admin.execute_command("ACL", "SETUSER", "run", "reset", "on", "nopass", "-@all", *ACL_RULES.split())
        opened(*urls).reach(retry_s=LONG_S)
        its_admin.execute_command("ACL", "SETUSER", "run", "-xadd")
    store = opened(*urls)
    store.reach(retry_s=LONG_S)
    assert store.generation is not None and "a spare store is unusable; the run goes on without it" in caplog.text
    admin.flushall()


def test_server_that_is_loading_is_waited_for(opened: Open, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(port, retry_s=0.3)

    def loading(*_command: object, **_options: object) -> object:
        raise redis.BusyLoadingError("Redis is loading the dataset in memory")

    monkeypatch.setattr("zeroband.elastic.store.connection.StoreClient.execute_command", loading)
    with pytest.raises(StoreLost, match=r"did not answer for 0\.3 s: Redis is loading the dataset in memory"):
        store.reach(retry_s=0.3)
