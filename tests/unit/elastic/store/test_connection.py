"""The way to Redis, against real servers: login, ACL, TLS, Sentinel, a long way, and which errors pass.

The user of a run needs exactly `ACL_RULES`, which the tests below prove both ways:

    ACL SETUSER NAME on >PASSWORD resetkeys ~zeroband:* -@all
        +del +evalsha +exists +expire +get +getrange +hdel +hexists +hget +hgetall +hincrby +hlen +hmget +hset +hsetnx
        +incrby +lpush +lrange +ltrim +mget +script|load +select +set +strlen +time +type +xadd +xdel +xrange +xread
        +xrevrange +zadd +zcard +zcount +zrangebyscore +zrem +zscore

(`+select` only where store.url names a database.) With Sentinel that asks for a login, its user needs
`+sentinel|get-master-addr-by-name` and nothing else.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.certificates import write_certificate
from tests.relay import Damage, Relay, Wound
from tests.servers import until
from tests.stores import free_port

from zeroband.elastic.membership.records import LinkRates, Peer, Ready, RoundPlan, Verdict
from zeroband.elastic.store import connection, redis_run, redis_store, scripts, store_in_use
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.connection import (
    GarbledAnswer,
    StoreClient,
    connect,
    forget_connections,
    is_refusal,
    is_unfit,
)
from zeroband.elastic.store.fact_records import FactBatch, FactLine
from zeroband.elastic.store.keys import ACL_RULES, COMMANDS
from zeroband.elastic.store.redis_run import Appended
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError
from zeroband.observe.jsonl import FilePlace

DEADLINE_S = 20.0
TIMEOUT_S = 5.0
PASSWORD = "s3cret/@:"
QUOTED = "s3cret%2F%40%3A"
SERVICE = "main"

Launch = Callable[..., int]
Open = Callable[..., StoreClient]
Script = Callable[[bytes], int]


# -- servers ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def port(launch: Launch) -> int:
    """Port of a server with a password and ACL users."""
    port = launch("--requirepass", PASSWORD)
    with redis.Redis(port=port, password=PASSWORD) as admin:
        for user, rules in {"run": ACL_RULES, "reader": "~zeroband:* +get +evalsha +script|load"}.items():
            admin.acl_setuser(user, enabled=True, passwords=[f"+{PASSWORD}"])
            admin.execute_command("ACL", "SETUSER", user, "resetkeys", "-@all", *rules.split())
    return port


@pytest.fixture
def admin(port: int) -> Iterator[redis.Redis]:
    with redis.Redis(port=port, password=PASSWORD) as client:
        client.flushall()
        yield client


@pytest.fixture
def relay(port: int) -> Iterator[Callable[..., Relay]]:
    """`relay(target_port, **how)`: a relay to this module's server or another one; closed at the end."""
    relays: list[Relay] = []

    def one(target_port: int = port, **how: object) -> Relay:
        relays.append(Relay(target_port, **how))  # type: ignore[arg-type]
        return relays[-1]

    yield one
    for opened in relays:
        opened.close()


@pytest.fixture
def opened() -> Iterator[Open]:
    """`opened(url)`: a client, closed at the end."""
    with contextlib.ExitStack() as stack:

        def one(url: str, *, timeout_s: float = TIMEOUT_S) -> StoreClient:
            client = connect(url, timeout_s=timeout_s)
            stack.callback(client.close)
            return client

        yield one


def _error(client: redis.Redis) -> redis.RedisError:
    with pytest.raises(redis.RedisError) as caught:
        client.get("zeroband:a")
    return caught.value


def _refusal(client: redis.Redis) -> str:
    message = is_refusal(_error(client))
    assert message is not None and "s3cret" not in message
    return message


# -- login ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "login", [f":{QUOTED}@127.0.0.1:PORT/2", f"default:{QUOTED}@127.0.0.1:PORT", f"run:{QUOTED}@127.0.0.1:PORT/2"]
)
def test_connect_logs_in_with_a_password_alone_and_as_a_user(port: int, opened: Open, login: str) -> None:
    client = opened(f"redis://{login.replace('PORT', str(port))}")
    client.set("zeroband:a", 1)
    assert client.get("zeroband:a") == b"1"


@pytest.mark.usefixtures("redis_client")
def test_connect_reaches_a_server_through_its_unix_socket(redis_url: str, opened: Open) -> None:
    client = opened(f"{redis_url}?db=3")
    assert client.set("zeroband:a", 1) and client.client_info()["db"] == 3


@pytest.mark.parametrize(
    ("login", "why"),
    [
        ("", "Redis asks for a password"),
        (":s3cret@", "Redis refused the login"),
        (f"nobody:{QUOTED}@", "Redis refused the login"),
        (f"run:{QUOTED}@", None),
    ],
)
def test_wrong_login_is_refused_at_once(port: int, opened: Open, login: str, why: str | None) -> None:
    client = opened(f"redis://{login}127.0.0.1:{port}")
    if why is None:
        assert client.set("zeroband:a", 1)
    else:
        assert _refusal(client).startswith(f"store.url: {why}")


def test_missing_database_is_refused(port: int, opened: Open) -> None:
    assert "no database of that number" in _refusal(opened(f"redis://:{QUOTED}@127.0.0.1:{port}/999"))


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.set("zeroband:a", 1),
        lambda client: client.get("another:a"),
        lambda client: client.register_script("return redis.call('SET', KEYS[1], 1)")(keys=["zeroband:a"]),
        lambda client: client.register_script("return redis.call('GET', ARGV[1])")(args=["another:a"]),
        lambda client: client.pipeline().set("zeroband:a", 1).execute(),
    ],
    ids=["command", "key", "command of a script", "key of a script", "command of a transaction"],
)
def test_user_without_a_permission_is_refused_with_the_rules_it_needs(
    port: int, opened: Open, call: Callable[[redis.Redis], object]
) -> None:
    with pytest.raises(redis.RedisError) as caught:
        call(opened(f"redis://reader:{QUOTED}@127.0.0.1:{port}"))
    message = is_refusal(caught.value)
    assert message is not None and ACL_RULES in message and "s3cret" not in message


def test_rules_of_the_docstring_are_those_of_the_code() -> None:
    written = re.findall(r"\+[a-z|]+", (__doc__ or "").partition("(`")[0])
    assert written == [f"+{command}" for command in COMMANDS]


def test_acl_rules_hold_each_command_of_the_store_and_no_other() -> None:
    """Read from the sources, so that paths without a test are covered too."""
    inside = set(re.findall(r"redis\.p?call\('([A-Z]+)'", Path(scripts.__file__).read_text()))
    asks = "".join(Path(asking.__file__).read_text() for asking in (redis_run, redis_store, store_in_use))
    outside = set(re.findall(r"_redis\.([a-z]+)\b", asks))
    spoken = {name.lower() for name in inside | outside} - {"close", "delete"}
    spoken |= {"evalsha", "script|load", "del", "select"}  # what redis-py makes of them
    spoken |= set(map(str.lower, re.findall(r'wait = \("([A-Z]+)"', asks)))
    assert spoken == set(COMMANDS)


def test_user_with_the_acl_rules_can_do_all_that_a_store_does(port: int, admin: redis.Redis) -> None:
    admin.config_resetstat()
    plan, key = RoundPlan(1, 1, 0, ("a#1",), (1,)), "zeroband:{run}:group:k"
    verdict, ready = Verdict(plan, "digest"), Ready(0, 1, "state")
    with contextlib.closing(RedisStore(f"redis://run:{QUOTED}@127.0.0.1:{port}/1", "run", retry_s=TIMEOUT_S)) as run:
        run.reach(retry_s=TIMEOUT_S)
        for _ in range(2):
            shared = run.found_or_match({"train.batch_size": "64"})
        assert run.renew_lease("a#1", Peer("a", "127.0.0.1", 1, False), first=True)
        seen = run.announce_ready("a#1", ready)
        assert run.await_change(0, seen, within_s=0.01) == seen
        run.publish_links("a#1", LinkRates({}, 1))
        run.view(0)
        assert run.links() == {"a#1": LinkRates({}, 1)}
        assert run.propose_plan(plan, current=None)
        run.vote(plan, "a#1", "digest")
        assert run.propose_verdict(verdict) and not run.report_failure(plan, "too late")
        assert run.history() == [verdict] and run.view(0).committed == verdict
        run.group_set(key, b"1")
        assert run.group_get([key]) == [b"1"] and run.group_delete(key) and run.group_add(key, 2) == 2
        for end in (b"", *(b"x" * 500_000 for _ in range(5))):
            place = FilePlace("file", len(end))
            batch = FactBatch((FactLine("events.jsonl", place, {"text": end.decode()}),), {"events.jsonl": place})
            newest = run.append_facts("a", entries[-1].id if (entries := run.read_facts("a", "")) else "", batch, batch)
            assert isinstance(newest, Appended)
        assert len(run.read_facts("a", "")) == 4 and run.recorders()
        run.expire_lease("a#1")
        assert run.renew_lease("a#1", Peer("a", "127.0.0.1", 1, False))
        run.release_lease("a#1")
        admin.flushall()
        assert run.restore(StoreBackup("a#1", shared, plan, verdict, ready, (plan, "digest")))
    spoken = {name.removeprefix("cmdstat_").partition("|")[0] for name in admin.info("commandstats")}
    assert {command.partition("|")[0] for command in COMMANDS} <= spoken


# -- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with NAME.pem and NAME.key of `server` (for 127.0.0.1, its own authority) and of `other`."""
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("server", "other"):
        write_certificate(folder, name)
    return folder


def _server_context(certificates: Path, *, asks_for: str | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    if asks_for is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificates / f"{asks_for}.pem")
    return context


@pytest.fixture
def tls_port(relay: Callable[..., Relay], certificates: Path) -> int:
    return relay(tls=_server_context(certificates)).port


@pytest.mark.parametrize(
    ("host", "options"),
    [
        ("127.0.0.1", "ssl_ca_certs=FOLDER/server.pem"),
        ("localhost", "ssl_ca_certs=FOLDER/server.pem&ssl_check_hostname=false"),
        ("localhost", "ssl_cert_reqs=none"),
    ],
)
def test_connect_speaks_tls(tls_port: int, certificates: Path, opened: Open, host: str, options: str) -> None:
    options = options.replace("FOLDER", str(certificates))
    client = opened(f"rediss://:{QUOTED}@{host}:{tls_port}?{options}")
    assert client.set("zeroband:a", 1)


@pytest.mark.parametrize(
    ("host", "options", "why"),
    [
        ("127.0.0.1", "", "self-signed certificate"),
        ("127.0.0.1", "?ssl_ca_certs=FOLDER/other.pem", "certificate"),
        ("localhost", "?ssl_ca_certs=FOLDER/server.pem", "Hostname mismatch"),
    ],
)
def test_server_without_a_trusted_certificate_is_refused(
    tls_port: int, certificates: Path, opened: Open, host: str, options: str, why: str
) -> None:
    options = options.replace("FOLDER", str(certificates))
    message = _refusal(opened(f"rediss://:{QUOTED}@{host}:{tls_port}{options}"))
    assert "the certificate of Redis is not accepted" in message and why in message and "ssl_ca_certs" in message


@pytest.mark.parametrize(("ours", "accepted"), [("other", True), ("server", False), (None, False)])
def test_own_certificate_is_shown_to_a_server_that_asks(
    relay: Callable[..., Relay], certificates: Path, opened: Open, ours: str | None, accepted: bool
) -> None:
    tls = relay(tls=_server_context(certificates, asks_for="other"))
    url = f"rediss://:{QUOTED}@127.0.0.1:{tls.port}?ssl_ca_certs={certificates}/server.pem"
    if ours is not None:
        url += f"&ssl_certfile={certificates}/{ours}.pem&ssl_keyfile={certificates}/{ours}.key"
    client = opened(url)
    if accepted:
        assert client.set("zeroband:a", 1)
    else:
        assert "does not accept our certificate" in _refusal(client)


def test_tls_to_a_server_without_it_is_refused(opened: Open, script: Script) -> None:
    message = _refusal(opened(f"rediss://127.0.0.1:{script(b'-ERR unknown command')}"))
    assert "speaks no TLS" in message and "redis://" in message


def test_plain_text_to_a_server_with_tls_may_pass(tls_port: int, opened: Open) -> None:
    """It closes the connection without an answer, as a stopping server does."""
    assert is_refusal(_error(opened(f"redis://:{QUOTED}@127.0.0.1:{tls_port}"))) is None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("ssl_ca_certs=FOLDER/none.pem", "ssl_ca_certs=FOLDER/none.pem cannot be read: No such file"),
        ("ssl_ca_certs=FOLDER", "ssl_ca_certs=FOLDER cannot be read: Is a directory"),
        ("ssl_ca_certs=FOLDER/server.key", "do not fit"),
        ("ssl_certfile=FOLDER/server.pem&ssl_keyfile=FOLDER/other.key", "do not fit (KEY_VALUES_MISMATCH)"),
    ],
)
def test_files_that_tls_cannot_use_are_errors_of_the_user(certificates: Path, options: str, why: str) -> None:
    options, why = (text.replace("FOLDER", str(certificates)) for text in (options, why))
    with pytest.raises(ConfigError, match=re.escape(why)):
        connect(f"rediss://h?{options}", timeout_s=1)


def test_wrong_address_is_an_error_of_the_user() -> None:
    with pytest.raises(ConfigError, match="no address of a Redis") as caught:
        connect("redis://:s3cret@h:x", timeout_s=1)
    assert caught.value.__cause__ is None and "s3cret" not in str(caught.value)


# -- the line ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_view_of_a_store_far_away_takes_one_round_trip(relay: Callable[..., Relay]) -> None:
    way = relay(delay_s=0.05)
    with contextlib.closing(RedisStore(f"redis://run:{QUOTED}@127.0.0.1:{way.port}", "run", retry_s=TIMEOUT_S)) as far:
        far.view(0)
        for _ in range(2):
            before = way.requests
            far.view(0)
            assert way.requests == before + 1


def test_new_connection_takes_a_round_trip_for_the_login_only(relay: Callable[..., Relay], opened: Open) -> None:
    way = relay()
    opened(f"redis://run:{QUOTED}@127.0.0.1:{way.port}").get("zeroband:a")
    assert way.requests == 2


def test_connection_is_kept_alive(port: int, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[tuple[object, ...]] = []
    choose = socket.socket.setsockopt

    def note(connection: socket.socket, *option: Any) -> None:
        chosen.append(option)
        choose(connection, *option)

    monkeypatch.setattr(socket.socket, "setsockopt", note)
    opened(f"redis://:{QUOTED}@127.0.0.1:{port}").ping()
    assert (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1) in chosen


def test_call_after_a_cut_goes_over_a_new_connection(relay: Callable[..., Relay], opened: Open) -> None:
    way = relay()
    client = opened(f"redis://:{QUOTED}@127.0.0.1:{way.port}")
    client.set("zeroband:a", 1)
    way.cut()
    with contextlib.suppress(redis.ConnectionError):  # the first may find the end of the old one
        client.get("zeroband:a")
    assert client.get("zeroband:a") == b"1"


def test_forget_connections_makes_the_next_call_connect_anew(port: int, admin: redis.Redis, opened: Open) -> None:
    client = opened(f"redis://:{QUOTED}@127.0.0.1:{port}")
    before = client.client_id()
    forget_connections(client)
    assert client.client_id() != before


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def script() -> Iterator[Script]:
    """`script(reply)`: the port of a server that answers everything with one line; empty: not at all."""
    with contextlib.ExitStack() as stack:

        def one(reply: bytes) -> int:
            class Actor(socketserver.BaseRequestHandler):
                def handle(self) -> None:
                    with contextlib.suppress(OSError):
                        while self.request.recv(1 << 16):
                            self.request.sendall(reply + b"\r\n" if reply else b"")

            server = stack.enter_context(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Actor))
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return server.server_address[1]

        yield one


_IN_SCRIPT = b"-ERR Error running script (call to f_1): @user_script:1: @user_script: 1: "


_REPLICA = "it is a replica: name its master"
_CLUSTER = "node of a Redis Cluster"
ANSWERS: list[tuple[bytes, str | None, str | None]] = [
    (b"-LOADING Redis is loading the dataset in memory", None, None),
    (b"-TRYAGAIN Multiple keys request during rehashing of slot", None, None),
    (b"-BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE.", None, None),
    (b"-ERR max number of clients reached", None, None),
    (b"", None, None),
    (b"-READONLY You can't write against a read only replica.", None, _REPLICA),
    (_IN_SCRIPT + b"-READONLY You can't write against a read only replica.", None, _REPLICA),
    (b"-MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.", None, _REPLICA),
    (b"-OOM command not allowed when used memory > 'maxmemory'.", None, "raise its maxmemory"),
    (_IN_SCRIPT + b"-OOM command not allowed when used memory > 'maxmemory'.", None, "raise its maxmemory"),
    (b"-MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist", None, "--save"),
    (b"-NOREPLICAS Not enough good replicas to write.", None, "min-replicas-to-write"),
    (b"-CLUSTERDOWN The cluster is down", None, _CLUSTER),
    (b"-ERR script tried accessing undeclared key", None, "Redis 6.2 or later"),
    (b"-NOSCRIPT No matching script.", None, "with scripts"),
    (b"-MOVED 3999 10.0.0.7:6379", _CLUSTER, _CLUSTER),
    (b"-CLUSTERDOWN Hash slot not served", _CLUSTER, _CLUSTER),
    (b"-ERR unknown command 'GET'", "a run needs Redis 6.2 or later", "a run needs Redis 6.2 or later"),
    (b"HTTP/1.1 400 Bad Request", "there is no Redis; if it expects TLS, write rediss://", "there is no Redis"),
    (b"-NOPERM ACL failure in script: User run has no permissions to run the 'get' command", "its rules", "its rules"),
    (b"-DENIED Redis is running in protected mode because protected mode is enabled", "accepts no", "accepts no"),
]
"""A server's error, with the results of `is_refusal` and `is_unfit`."""


@pytest.mark.parametrize(("reply", "refusal", "unfit"), ANSWERS, ids=[reply for reply, _, _ in ANSWERS])
def test_permanent_errors_are_told_from_transient_ones(
    script: Script, opened: Open, reply: bytes, refusal: str | None, unfit: str | None
) -> None:
    error = _error(opened(f"redis://127.0.0.1:{script(reply)}", timeout_s=5.0 if reply else 0.05))
    for said, words in ((is_refusal(error), refusal), (is_unfit(error), unfit)):
        assert (said is None) == (words is None)
        assert said is None or (said.startswith("store.url: ") and str(words) in said)


def test_call_is_tried_once(script: Script, relay: Callable[..., Relay], opened: Open) -> None:
    way = relay(script(b"-LOADING Redis is loading the dataset in memory"))
    _error(opened(f"redis://127.0.0.1:{way.port}"))
    assert way.requests == 1


def test_missing_server_is_a_transient_error(opened: Open) -> None:
    port = free_port()
    for url in (f"redis://127.0.0.1:{port}", f"rediss://127.0.0.1:{port}", "unix:///nowhere/redis.sock"):
        assert is_refusal(_error(opened(url))) is None
    error = _error(opened(f"redis+sentinel://127.0.0.1:{port}/{SERVICE}"))
    assert is_refusal(error) is None and str(port) in str(error)


@pytest.mark.parametrize(
    "reply",
    [
        b"-ERR Protocol error: unauthenticated multibulk length",
        b"-ERR Protocol error: expected '$', got '7'",
        b"-WRONGTYPE Operation against a key holding the wrong kind of value",
        b"-SOMETHING that no server says yet",
        b":x",
        b"+" + 70 * b"7",
        b"*2\r\n$1\r\na",
        b"$-7",
    ],
)
def test_unknown_error_is_transient(script: Script, opened: Open, reply: bytes) -> None:
    client = opened(f"redis://127.0.0.1:{script(reply)}", timeout_s=0.2)
    with pytest.raises(redis.RedisError) as caught:
        client.execute_script(scripts.Script("return 1", (), int), [], [])
    assert is_refusal(caught.value) is None


def test_malformed_answer_closes_the_connection(relay: Callable[..., Relay], opened: Open) -> None:
    """A length that lost a byte leaves the rest of the answer unread; the next call must not read it."""
    way = relay()
    client = opened(f"redis://:{QUOTED}@127.0.0.1:{way.port}")
    client.set("zeroband:a", 12 * "a")
    before = client.client_id()
    way.damage = Damage(Wound.DROP, 1)
    with pytest.raises(GarbledAnswer):
        client.get("zeroband:a")
    assert client.get("zeroband:a") == 12 * b"a" and client.client_id() != before


def test_answer_of_another_shape_is_rejected(port: int, opened: Open) -> None:
    client = opened(f"redis://:{QUOTED}@127.0.0.1:{port}")
    fitting = scripts.Script("return {1, 'a', {}}", (), (int, bytes, list))
    assert client.execute_script(fitting, [], []) == [1, b"a", []]
    for text, shape in (
        ("return {1, 'a'}", (int, bytes, list)),
        ("return {'a', 1}", (int, bytes)),
        ("return 7", frozenset((0, 1))),
        ("return 'a'", int),
        ("return 1", (int,)),
    ):
        with pytest.raises(GarbledAnswer):
            client.execute_script(scripts.Script(text, (), shape), [], [])


# -- Sentinel ---------------------------------------------------------------------------------------------------------

SENTINEL_RULES = "on >s3cret -@all +sentinel|get-master-addr-by-name"


@pytest.fixture
def sentinels(launch: Launch, port: int) -> Callable[[int], int]:
    """`sentinels(master_port)`: the port of a Sentinel that watches a master and asks for a login."""

    def one(master_port: int) -> int:
        file = f"sentinel monitor {SERVICE} 127.0.0.1 {master_port} 1\nsentinel auth-pass {SERVICE} {PASSWORD}\n"
        file += f"sentinel failover-timeout {SERVICE} 5000\nuser default on nopass +@all\nuser run {SENTINEL_RULES}\n"
        file += "user reader on >s3cret -@all +ping\n"
        return launch("--sentinel", file=file)

    return one


def _sentinel_url(*ports: int, login: str = "run", service: str = SERVICE) -> str:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    options = f"sentinel_username={login}&sentinel_password=s3cret" if login else ""
    return f"redis+sentinel://run:{QUOTED}@{hosts}/{service}/1?{options}".rstrip("?")


def test_sentinel_names_the_master(port: int, sentinels: Callable[[int], int], opened: Open, script: Script) -> None:
    away = free_port()
    client = opened(_sentinel_url(away, script(b"*-1"), sentinels(port)))
    client.set("zeroband:a", 7)
    with redis.Redis(port=port, password=PASSWORD, db=1) as admin:
        assert admin.get("zeroband:a") == b"7"


def test_sentinel_that_refuses_is_a_refusal(port: int, sentinels: Callable[[int], int], opened: Open) -> None:
    sentinel = sentinels(port)
    assert "Sentinel knows no service 'none'" in _refusal(opened(_sentinel_url(sentinel, service="none")))
    assert "Sentinel refused the login" in _refusal(opened(_sentinel_url(sentinel, login="nobody")))
    assert "sentinel_password" in _refusal(opened(_sentinel_url(sentinel, login="nobody")))
    assert _refusal(opened(_sentinel_url(sentinel, login="reader"))).endswith(" +sentinel|get-master-addr-by-name")


def test_redis_in_the_place_of_a_sentinel_is_a_refusal(script: Script, opened: Open) -> None:
    no_sentinel = script(b"-ERR unknown command `SENTINEL`, with args restart_point with:")
    assert "there is no Sentinel" in _refusal(opened(_sentinel_url(no_sentinel)))


def test_refusal_of_one_sentinel_waits_for_the_silent_ones(
    port: int, sentinels: Callable[[int], int], opened: Open
) -> None:
    away = free_port()
    assert is_refusal(_error(opened(_sentinel_url(sentinels(port), away, service="none")))) is None


def test_sentinel_and_redis_are_reached_over_tls(
    relay: Callable[..., Relay], certificates: Path, opened: Open, script: Script
) -> None:
    master = str(relay(tls=_server_context(certificates)).port).encode()
    names_it = script(b"*2\r\n$9\r\n127.0.0.1\r\n$%d\r\n%s" % (len(master), master))
    sentinel = relay(names_it, tls=_server_context(certificates))
    tls = f"ssl_ca_certs={certificates}/server.pem"
    client = opened(f"rediss+sentinel://run:{QUOTED}@127.0.0.1:{sentinel.port}/{SERVICE}?{tls}")
    assert client.set("zeroband:a", 1)


@pytest.mark.slow
def test_call_after_a_failover_reaches_the_new_master_while_the_old_one_still_takes_writes(
    launch: Launch, sentinels: Callable[[int], int], opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "RECHECK_S", 0.0)
    old, new, sentinel = _replicated(launch, sentinels)
    client = opened(_sentinel_url(sentinel).replace("run:", "default:"))
    assert client.info("server")["tcp_port"] == old
    with redis.Redis(port=sentinel) as watcher:
        until(lambda: _begins_failover(watcher), "failover")
        until(lambda: _named_port(watcher) == new, "other master")
    with redis.Redis(port=old, password=PASSWORD) as late:
        assert late.set("zeroband:late", 1)  # Sentinel demotes it some 10 s from now
    assert client.info("server")["tcp_port"] == new
    assert client.set("zeroband:a", 1)


def test_connection_outlives_its_sentinels(
    port: int,
    relay: Callable[..., Relay],
    sentinels: Callable[[int], int],
    opened: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "RECHECK_S", 0.0)
    way = relay(sentinels(port))
    client = opened(_sentinel_url(way.port))
    client.set("zeroband:a", 1)
    way.close()
    assert client.get("zeroband:a") == b"1"


def _named_port(sentinel: redis.Redis) -> int:
    return int(sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])


def _begins_failover(sentinel: redis.Redis) -> bool:
    try:
        return bool(sentinel.sentinel_failover(SERVICE))
    except redis.ResponseError:  # it has not yet looked at the replica well enough
        return False


def _replicated(launch: Launch, sentinels: Callable[[int], int]) -> tuple[int, int, int]:
    """Ports of a master, its replica and their Sentinel, once the Sentinel knows both."""
    login = ("--requirepass", PASSWORD, "--masterauth", PASSWORD, "--repl-diskless-sync-delay", "0")
    master = launch(*login)
    replica = launch(*login, file=f"replicaof 127.0.0.1 {master}")
    with redis.Redis(port=replica, password=PASSWORD) as client:
        until(lambda: client.info("replication")["master_link_status"] == "up", "link")
    sentinel = sentinels(master)
    with redis.Redis(port=sentinel) as watcher:
        until(lambda: len(watcher.sentinel_slaves(SERVICE)) == 1, "replica")
    return master, replica, sentinel
