"""Connections to Redis: password, ACL user, TLS, Sentinel, a node's sealed port; and which errors are transient.

An answer of an unexpected shape closes the connection, so a stream that lost a byte is never read further. No retries
and no keys. Any thread.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import redis
from redis._parsers.hiredis import _HiredisParser  # pyright: ignore[reportPrivateUsage]
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthorizationError,
    ClusterCrossSlotError,
    InvalidResponse,
    NoPermissionError,
    NoScriptError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool

from zeroband.config.store_url import NODE, StoreUrl, TlsOptions, parse_store_url, place_of
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.store.keys import ACL_RULES
from zeroband.elastic.store.scripts import Script, Shape
from zeroband.elastic.transport.dial import dial_store
from zeroband.errors import ConfigError, HandshakeFailed

RECHECK_S = 1.0
"""Interval for asking Sentinel whether the master has changed. A healthy master that was replaced by command accepts
writes for about 10 s more, until Sentinel demotes it; they would be lost."""

_SENTINEL_TIMEOUT_S = 2.0
"""Short, so that a Sentinel that is down leaves time for the others."""
_SENTINELS_AWAY_S = 10.0
"""Pause before asking again if no Sentinel answers."""

_TRANSIENT = ("LOADING ", "BUSY ", "TRYAGAIN ")
"""Prefixes of errors that end soon."""
_STATES = {
    "read only replica": "it is a replica: name its master, or its Sentinels as redis+sentinel://",
    "Link with MASTER is down": "it is a replica: name its master, or its Sentinels as redis+sentinel://",
    "used memory > 'maxmemory'": "its memory is full: raise its maxmemory, or take one that others do not fill",
    "MISCONF ": "it cannot save to its disk: make room there, or start it with --save '', as a run needs no disk",
    "Not enough good replicas": "too few of its replicas are there: start them, or set its min-replicas-to-write to 0",
    "The cluster is down": "it is a node of a Redis Cluster: name a Redis that is not part of a cluster",
}
"""Errors of a server that cannot serve a run, and their remedies."""
_FORBIDDEN_IN_SCRIPT = ("The user executing the script can't", "ACL failure in script")
_IN_CLUSTER = ("Hash slot not served", "a non local key in a cluster node")
_NO_REDIS = "protocol error"
"""Prefix of the parser's error if the answer does not start like a reply of Redis; otherwise a reply was damaged."""
_NOT_TLS = ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "HTTP_REQUEST")
_OUR_CERTIFICATE_REFUSED = re.compile(r"ALERT_(CERTIFICATE_|BAD_CERTIFICATE|UNKNOWN_CA|ACCESS_DENIED|NO_CERTIFICATE)")


class GarbledAnswer(redis.ConnectionError):
    """The answer does not fit the request: a byte was lost or added in transit. The connection is closed."""


class StoreClient(redis.Redis):
    """A client that accepts only one complete reply of the right shape, with nothing behind it."""

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command and return its answer. `shape`: of the answer. Raises GarbledAnswer, redis.RedisError.

        Bypasses redis-py's own method, whose retries and telemetry double the time of a call.
        """
        return self._send([args], **options)

    def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        """Read the answer to one command; a malformed one closes the connection."""
        shape: Shape = options.pop("shape", object)
        try:
            answer = super().parse_response(connection, command_name, **options)
        except (ValueError, TypeError, LookupError):
            connection.disconnect()
            raise
        if _has_more(connection) or not has_shape(answer, shape):
            connection.disconnect()
            raise GarbledAnswer("an answer of Redis is longer than it says, or not what was asked for")
        return answer

    def execute_script(
        self,
        script: Script,
        keys: Sequence[str],
        args: Sequence[str | bytes | int],
        *,
        wait: Sequence[str | int] = (),
    ) -> Any:
        """Run a script, which is loaded if the server lacks it, and return its answer.

        `wait`: a blocking command to send before it in the same round trip; the server starts the script when that is
        over. Raises as `execute_command`.
        """
        command, shape = ("EVALSHA", script.sha, len(keys), *keys, *args), script.answer
        try:
            return self._send([wait, command], shape=shape) if wait else self.execute_command(*command, shape=shape)
        except NoScriptError:
            self.script_load(script.text)
            return self.execute_command(*command, shape=shape)

    def _send(self, commands: Sequence[Sequence[Any]], **options: Any) -> Any:
        """Send commands in one round trip; return the answer to the last."""
        pool = self.connection_pool
        connection: Any = pool.get_connection()
        try:
            connection.send_packed_command(connection.pack_commands(commands))
            for _ in commands[1:]:
                try:
                    connection.read_response()
                except redis.ResponseError:
                    connection.disconnect()  # the other answer is still unread
                    raise
            return self.parse_response(connection, commands[-1][0], **options)
        except (ValueError, TypeError, LookupError) as error:
            connection.disconnect()
            raise GarbledAnswer(f"an answer of Redis cannot be read: {error!r}") from error
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            connection.disconnect()
            raise
        finally:
            pool.release(connection)


def has_shape(answer: object, shape: Shape) -> bool:
    """Whether an answer has this shape."""
    if isinstance(shape, tuple):
        if not isinstance(answer, list) or len(answer) != len(shape):
            return False
        return all(map(has_shape, answer, shape))
    return isinstance(answer, int) and answer in shape if isinstance(shape, frozenset) else isinstance(answer, shape)


def _has_more(connection: Any) -> bool:
    """Whether there is unread data behind the answer."""
    try:
        return connection.is_connected and connection.can_read()
    except redis.ConnectionError:  # the server closed it after this answer
        return False


def connect(url: str, *, timeout_s: float, key: RunKey | None = None) -> StoreClient:
    """Return a client of the Redis, of Sentinel's master, or of the node's store at `url`; connects at its first call.

    `timeout_s`: longest wait for a connection, and for an answer. `key`: the run's key, which nodes' stores require.
    With Sentinel, connections to a replaced master are closed within `RECHECK_S`; unreachable Sentinels do not end a
    working connection.
    Raises: ConfigError if the address is wrong or a file in it cannot be read.
    """
    try:
        store = parse_store_url(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if store.tls is not None:
        _try_tls_files(store.tls)
    return cast("StoreClient", StoreClient.from_pool(_pool(store, timeout_s, key)))


def forget_connections(client: redis.Redis) -> None:
    """Close idle connections, so that the next call resolves the server again. Calls in flight continue."""
    client.connection_pool.disconnect(inuse_connections=False)


def is_refusal(error: BaseException) -> str | None:
    """Why waiting is pointless after a call's error, as a message for the user; None: the error may be transient.

    Unknown errors count as transient: an answer that an attacker provokes must not end a run.
    """
    if isinstance(error, (SentinelRefusal, NodeRefusal)):
        return str(error)
    return _refusal(error, _REDIS)


def is_unfit(error: BaseException) -> str | None:
    """Why a server that answers cannot serve a run, as a message for the user; None: it may soon.

    During a run such a state may pass. At its start, the server is the wrong one or misconfigured.
    """
    refusal, text = is_refusal(error), _shortened(str(error))
    if refusal is not None or not isinstance(error, redis.ResponseError):
        return refusal
    if isinstance(error, TryAgainError) or text.startswith(_TRANSIENT):
        return None
    ways_out = (way_out for words, way_out in _STATES.items() if words in text)
    return f"store.url: Redis answers with an error ({text}); {next(ways_out, _NEEDED)}"


class _ReadingParser(_HiredisParser):
    """Checks for pending data by reading instead of polling.

    redis-py's own parser polls the descriptor, and so mistakes the session tickets that TLS 1.3 sends after its
    handshake for an unsolicited answer. A read tells them apart, also in a stream of sealed records.
    """

    def can_read(self, timeout: float = 0) -> bool:
        """Whether data arrives within `timeout` seconds. Raises redis.ConnectionError at end of stream."""
        if self._reader is None:
            raise redis.ConnectionError("the connection is closed")
        return self._reader.has_data() or self.read_from_socket(timeout=timeout, raise_on_timeout=False)


class NodeRefusal(redis.ConnectionError):
    """A node refused the handshake, or belongs to another run."""


class SealedConnection(redis.Connection):
    """An encrypted connection to a node's store through the node's port."""

    def __init__(self, *, key: RunKey, **settings: Any) -> None:
        super().__init__(**settings)
        self._key = key

    def _connect(self) -> Any:
        address, within_s = (self.host, int(self.port)), float(self.socket_connect_timeout or 0)
        try:
            connection = dial_store(self._key, address, within_s=within_s)
        except HandshakeFailed as error:
            raise NodeRefusal(f"store.peers: the node at {place_of(*address)} refuses this node: {error}") from error
        connection.settimeout(self.socket_timeout)
        return connection


class SentinelRefusal(redis.ConnectionError):
    """Sentinels answered, but none of them will ever name the master."""


@dataclass(frozen=True)
class _Server:
    """A kind of server, for messages. `login`: where its login is in an address. `rules`: the ACL that it needs."""

    name: str
    login: str
    rules: str


_NEEDED = "a run needs Redis 6.2 or later, or Valkey, with scripts and with no command renamed or left out"

_REDIS = _Server("Redis", "USER:PASSWORD@ before the host", ACL_RULES)
_SENTINEL = _Server(
    "Sentinel",
    "&sentinel_username=USER&sentinel_password=PASSWORD behind the ?",
    "+sentinel|get-master-addr-by-name",
)


def _refusal(error: BaseException, asked: _Server) -> str | None:
    text, who = str(error), asked.name
    if isinstance(error, (redis.AuthenticationError, AuthorizationError)):
        what = "asks for a password" if "equired" in text or "already authenticated" in text else "refused the login"
        return f"store.url: {who} {what} ({text}); write {asked.login}, with / ? # @ : % in them percent-encoded"
    if isinstance(error, NoPermissionError) or any(part in text for part in _FORBIDDEN_IN_SCRIPT):
        return (
            f"store.url: {who} does not let this user do what a run needs ({text}); its rules must hold {asked.rules}"
        )
    if isinstance(error, InvalidResponse) and text.casefold().startswith(_NO_REDIS):
        return f"store.url: what answers there is no {who}; if it expects TLS, write rediss:// or rediss+sentinel://"
    if isinstance(error, (AskError, ClusterCrossSlotError)) or any(part in text for part in _IN_CLUSTER):
        return f"store.url: this is a node of a Redis Cluster ({text}); name a Redis that is not part of a cluster"
    if isinstance(error, redis.ResponseError):
        return _refused_request(text, who)
    return _refused_tls(error, who)


def _refused_request(text: str, who: str) -> str | None:
    text = _shortened(text)
    if "DENIED" in text:
        way_out = "start it with --requirepass and write the password into the address"
        return f"store.url: {who} accepts no connection from another machine ({text}); {way_out}"
    if "DB index" in text or "SELECT is not allowed" in text:
        return f"store.url: {who} has no database of that number ({text}); leave the number out"
    if "unknown command" in text.lower() or "Unknown Redis command" in text:
        return f"store.url: what answers there is no {who} that a run can use ({text}); {_NEEDED}"
    return None


def _shortened(text: str) -> str:
    """A server's error without the arguments that it repeats and the advice that it adds."""
    return text.partition(", with args")[0].partition(" because protected mode")[0].strip()


def _refused_tls(error: BaseException, who: str) -> str | None:
    for cause in _causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            way_out = "name its authority with ?ssl_ca_certs=/PATH/ca.pem, or the host as the certificate does"
            return f"store.url: the certificate of {who} is not accepted ({cause.verify_message}); {way_out}"
        reason = (cause.reason or "") if isinstance(cause, ssl.SSLError) else ""
        if reason in _NOT_TLS:
            return f"store.url: {who} speaks no TLS at this port; write redis:// or redis+sentinel://, or its TLS port"
        if _OUR_CERTIFICATE_REFUSED.search(reason):
            way_out = "name another one with ?ssl_certfile=/PATH/cert.pem&ssl_keyfile=/PATH/key.pem"
            return f"store.url: {who} does not accept our certificate, or misses it ({reason}); {way_out}"
    return None


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and its causes; redis-py wraps network errors in its own."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__


def _try_tls_files(tls: TlsOptions) -> None:
    """Load the files of an address once, so that a wrong path is a ConfigError, not a network error."""
    for option, path in (("ssl_ca_certs", tls.ca_certs), ("ssl_certfile", tls.certfile), ("ssl_keyfile", tls.keyfile)):
        try:
            if path is not None:
                Path(path).open("rb").close()
        except OSError as error:
            raise ConfigError(f"store.url: {option}={path} cannot be read: {error.strerror}") from error
    try:
        context = ssl.create_default_context(cafile=tls.ca_certs)
        if tls.certfile is not None:  # without a password OpenSSL would prompt for it
            context.load_cert_chain(tls.certfile, tls.keyfile, tls.key_password or "")
    except ssl.SSLError as error:
        raise ConfigError(
            f"store.url: the files of ssl_ca_certs, ssl_certfile and ssl_keyfile do not fit ({error.reason or error}); "
            "they are PEM files, the key belongs to the certificate, and ssl_password opens it"
        ) from error


def _pool(store: StoreUrl, timeout_s: float, key: RunKey | None) -> redis.ConnectionPool:
    shared: dict[str, Any] = {
        **_settings(store.username, store.password, timeout_s),
        "db": store.database,
        "parser_class": _ReadingParser,
    }
    if store.socket_path is not None:
        by_socket: Any = redis.UnixDomainSocketConnection  # redis-py declares the argument too narrowly
        return redis.ConnectionPool(connection_class=by_socket, path=store.socket_path, **shared)
    shared["socket_keepalive"] = True
    if store.tls is not None:
        shared |= _tls_settings(store.tls)
    if store.service is not None:
        return _MasterPool(store.service, _sentinels(store, timeout_s), ssl=store.tls is not None, **shared)
    host, port = store.hosts[0]
    if store.scheme == NODE:
        assert key is not None, "a node's store requires the run's key"
        return redis.ConnectionPool(connection_class=SealedConnection, key=key, host=host, port=port, **shared)
    kind = redis.Connection if store.tls is None else redis.SSLConnection
    return redis.ConnectionPool(connection_class=kind, host=host, port=port, **shared)


def _settings(username: str | None, password: str | None, timeout_s: float) -> dict[str, Any]:
    return {
        "username": username,
        "password": password,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,  # a PING costs a round trip and shows no more than the call
        "protocol": 2,  # version 3 costs a round trip per connection (HELLO)
        "driver_info": None,  # costs two round trips per connection (CLIENT SETINFO)
    }


def _tls_settings(tls: TlsOptions) -> dict[str, Any]:
    return {
        "ssl_ca_certs": tls.ca_certs,
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_password": tls.key_password,
        "ssl_check_hostname": tls.check_hostname,
        "ssl_cert_reqs": "required" if tls.verifies else "none",
    }


def _sentinels(store: StoreUrl, timeout_s: float) -> _Sentinels:
    login = _settings(store.sentinel_username, store.sentinel_password, min(timeout_s, _SENTINEL_TIMEOUT_S))
    tls = {} if store.tls is None else {"ssl": True, **_tls_settings(store.tls)}
    sentinels = _Sentinels(store.hosts, sentinel_kwargs={**login, "socket_keepalive": True, **tls})
    for client in sentinels.sentinels:  # the parser is a setting of the pool, not of the client
        client.connection_pool.connection_kwargs["parser_class"] = _ReadingParser
    return sentinels


class _Sentinels(Sentinel):
    """Asks one Sentinel after another for the master; tells silent ones from refusals."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Return the master's address. Raises SentinelRefusal if most Sentinels refuse, else MasterNotFoundError."""
        silent: list[str] = []
        refusals: list[str] = []
        for sentinel in tuple(self.sentinels):
            try:
                found: Any = sentinel.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", service_name)
            except redis.RedisError as error:
                why = _refusal(error, _SENTINEL)
                (silent if why is None else refusals).append(why or str(error))
                continue
            if found is not None:
                self.sentinels.sort(key=lambda other: other is not sentinel)  # ask it first next time
                return found[0].decode(), int(found[1])
            refusals.append(
                f"store.url: Sentinel knows no service {service_name!r}; see its `sentinel monitor NAME ...`"
            )
        if len(refusals) > len(silent):
            raise SentinelRefusal(refusals[0])
        raise MasterNotFoundError(f"no Sentinel names the master of {service_name!r}: {'; '.join(silent + refusals)}")


class _MasterPool(SentinelConnectionPool):
    """Connections to the master. Asks Sentinel at each new connection, and periodically in between."""

    def __init__(self, service: str, sentinels: _Sentinels, **settings: Any) -> None:
        super().__init__(service, sentinels, **settings)
        self._ask_at_s = 0.0

    def get_connection(self, *args: Any, **options: Any) -> Any:
        """Return a connection to the current master."""
        self._follow_master()
        return super().get_connection(*args, **options)

    def _follow_master(self) -> None:
        now_s = time.monotonic()
        if self.master_address is None or now_s < self._ask_at_s:  # the first connection asks anyway
            return
        self._ask_at_s = now_s + RECHECK_S
        try:
            self.get_master_address()  # closes idle connections if the master has changed
        except (redis.ConnectionError, redis.TimeoutError):
            self._ask_at_s = time.monotonic() + _SENTINELS_AWAY_S

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Close idle connections; with `inuse_connections` all of them, and those to the Sentinels."""
        super().disconnect(inuse_connections)
        if inuse_connections:
            self.sentinel_manager.close()
