"""A run's records in one Redis: calls with retries, and records that no round depends on.

Any thread. Raises StoreLost if Redis does not answer in time, and ConfigError if it refuses.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import redis

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.membership.resume_rules import Holding
from zeroband.elastic.store import scripts
from zeroband.elastic.store.connection import connect, forget_connections, is_refusal, is_unfit
from zeroband.elastic.store.fact_records import FactBatch
from zeroband.elastic.store.keys import FACTS_TTL_S, GROUP_TTL_S, RUN_TTL_S, SPENT_TTL_S, Keys
from zeroband.elastic.store.record_verifier import RecordVerifier
from zeroband.elastic.store.scripts import Script
from zeroband.elastic.store.seals import Seals
from zeroband.elastic.store.store_cache import pairs, text_of
from zeroband.errors import ConfigError, StoreLost
from zeroband.node.backoff import Backoff
from zeroband.observe.log import get_logger

FACTS_BYTES, FACTS_ENTRIES = 2 << 20, 4096
"""Limits of a node's stream of facts; the oldest are dropped."""

PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 0.5
REMIND_S = 5.0

REFUSES_S = 5.0
"""A server that has answered with errors only for this long is unusable, unless it worked before."""

_SELF_TEST_TTL_S = 60

_PAGE, _NEWEST_PAGE = 64, 16
"""Entries of facts per read, and per search for the newest valid one."""

_log = get_logger(__name__)


class Appended(NamedTuple):
    """Result of an append to a node's stream of facts."""

    id: str
    is_listed: bool
    """Whether the node has a valid snapshot among the recorders."""


class FactEntry(NamedTuple):
    """An entry of a node's stream of facts."""

    id: str
    batch: FactBatch | None
    """None: invalid."""


class RedisRun:
    """The records of one run in one Redis.

    `key`: made of the run's token; None: the run has none. `retry_s`: time for which a call is retried with jittered
    back-off before it raises StoreLost; an attempt takes at most `answer_s`. `before_retry`: called before each further
    attempt; its exceptions end the call.
    """

    def __init__(
        self,
        address: str,
        run_id: str,
        *,
        key: RunKey | None,
        retry_s: float,
        answer_s: float,
        before_retry: Callable[[], None],
    ) -> None:
        self.keys = Keys(run_id)
        self.verifier = RecordVerifier(Seals(key, run_id, self.keys.prefix))
        self.address = address
        """Address of the store in use."""
        self._redis = connect(address, timeout_s=answer_s, key=key)
        self._retry_s, self._answer_s = retry_s, answer_s
        self._before_retry = before_retry
        self._has_answered, self._answered_at_s = False, time.monotonic()
        self._is_proven = False
        """Whether this server passed the self-test, so that a refusal may be temporary."""
        self._refused_since_s: float | None = None
        """Since when every answer has been an error; None: the last one was not, or there was none."""
        self._known_snapshot = ""
        """Digest of the valid snapshot of the node whose facts are appended, as last read."""
        self._recorders: dict[str, tuple[bytes, FactBatch | None]] = {}
        """Raw and parsed snapshot of each node, as last read."""

    # -- calls --------------------------------------------------------------------------------------------------

    def call(self, call: Callable[[], Any], retry_s: float | None = None) -> Any:
        """Return the result of a call of Redis, with retries."""
        retry_s = self._retry_s if retry_s is None else retry_s
        self._find_server()
        pauses = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, jitter=0.5)  # spreads the retries of members that lost it together
        started_at_s = reminded_at_s = time.monotonic()
        while True:
            try:
                answer = call()
            except (redis.RedisError, OSError) as error:
                if isinstance(error, redis.DataError):
                    raise  # our mistake; any answer of the store may be transient
                why, now_s = self._why_refused(error), time.monotonic()
                if now_s + pauses.longest_s > started_at_s + retry_s:
                    silence = f"Redis did not answer for {retry_s:g} s: {error}; check store.url"
                    raise StoreLost(silence if why is None else f"Redis refused for {retry_s:g} s: {why}") from error
                if now_s - reminded_at_s > REMIND_S:
                    reminded_at_s = now_s
                    what = "Redis is out of reach" if why is None else "Redis refuses"
                    _log.warning(f"{what}; trying again", extra={"fields": {"error": why or str(error)}})
            else:
                self._has_answered, self._answered_at_s, self._refused_since_s = True, time.monotonic(), None
                return answer
            forget_connections(self._redis)
            self._before_retry()
            self._note_silence(time.monotonic() - self._answered_at_s)
            time.sleep(pauses.pause_s())

    def _why_refused(self, error: redis.RedisError | OSError) -> str | None:
        """Return why a server that answers refuses a call; None: it does not answer, or the error is transient.

        Raises ConfigError if the refusal is permanent. After the self-test none is: the settings may be restored.
        """
        is_garbled = self._has_answered and isinstance(error, redis.InvalidResponse)  # in transit: it is a Redis
        why, now_s = None if is_garbled else is_unfit(error), time.monotonic()
        if why is None:
            self._refused_since_s = None
            return None
        if self._refused_since_s is None:
            self._refused_since_s = now_s
        is_final = is_refusal(error) is not None or now_s - self._refused_since_s > REFUSES_S
        if is_final and not self._is_proven:
            raise ConfigError(why) from error
        return why

    def _find_server(self) -> None:
        """Called before each call: find the server if it is not known yet."""

    def _note_silence(self, silent_s: float) -> None:
        """Called after each failed attempt. `silent_s`: time since the last answer."""

    def run_script(
        self,
        script: Script,
        *args: str | bytes | int,
        retry_s: float | None = None,
        wait: Sequence[str | int] = (),
        at: Mapping[str, str] | None = None,
    ) -> Any:
        """Run a script and log the keys that it deleted for their wrong type.

        `wait`: a blocking command to send before it. `at`: the keys that are no attributes of `Keys`, by their names.
        """
        keys = [(at or {}).get(name) or getattr(self.keys, name) for name in script.keys]
        deleted, result = self.call(lambda: self._redis.execute_script(script, keys, args, wait=wait), retry_s)
        for key in deleted:
            _log.warning("deleted a key of the wrong type from the store", extra={"fields": {"key": text_of(key)}})
        return result

    def require_usable(self, *, retry_s: float) -> None:
        """Run the self-test: each command of a run once. From then on refusals count as transient.

        Raises ConfigError if Redis refuses a command, and StoreLost.
        """
        keys = self.keys.scratch()
        wait = ("XREAD", "BLOCK", 1, "COUNT", 1, "STREAMS", keys[-1], "0-0")

        def ask() -> None:
            self._redis.script_load(scripts.SELF_TEST.text)
            _, refusal = self._redis.execute_script(scripts.SELF_TEST, keys, [_SELF_TEST_TTL_S], wait=wait)
            if isinstance(refusal, redis.ResponseError):
                raise refusal

        self._is_proven = False
        self.call(ask, retry_s)
        self._is_proven = True

    def trust_address(self) -> None:
        """Treat refusals as transient without a self-test: the run works with this store."""
        self._is_proven = True

    # -- checkpoints --------------------------------------------------------------------------------------------

    def publish_saving(self, attempt: str, node: str, message: str, *, retry_s: float) -> None:
        """Publish a message to the other writers of a checkpoint, in place of this node's previous one.

        `node`: its name with its key.
        """
        key = self.keys.saving(attempt)
        sealed = self.verifier.seal_saving(key, node, message)
        self.run_script(scripts.SET_FIELD, node, sealed, SPENT_TTL_S, at={"hash": key}, retry_s=retry_s)

    def saving(self, attempt: str, *, retry_s: float) -> dict[str, str]:
        """Return the writers' messages on a checkpoint, by node id."""
        key = self.keys.saving(attempt)
        raws = pairs(self.run_script(scripts.READ_HASH, at={"hash": key}, retry_s=retry_s))
        return self.verifier.saving(key, raws, self._living_nodes())

    def _living_nodes(self) -> dict[str, str]:
        """The living member of each node id, as far as known."""
        return {}

    def publish_holding(self, member_id: str, holding: Holding, *, retry_s: float | None = None) -> None:
        """Publish what this node has at its ckpt.path. It must hold a lease."""
        sealed = self.verifier.seal_holding(member_id, holding)
        self.run_script(scripts.PUBLISH_HOLDING, member_id, sealed, RUN_TTL_S, retry_s=retry_s)

    def holdings(self, *, retry_s: float | None = None) -> dict[str, Holding]:
        """Return what nodes have at their ckpt.path, by member; some of these may have left."""
        raws = pairs(self.run_script(scripts.READ_HASH, at={"hash": self.keys.holdings}, retry_s=retry_s))
        return self.verifier.holdings(self.keys.holdings, raws)

    # -- facts --------------------------------------------------------------------------------------------------

    def append_facts(
        self, node: str, newest: str, batch: FactBatch, snapshot: FactBatch | None, *, is_new: bool = True
    ) -> Appended | Sequence[FactEntry]:
        """Append to a node's stream if `newest` is the id of its newest entry; empty: the stream is empty.

        Otherwise return the newest entries, newest first: the answer to an earlier append may have been lost.
        `node`: its name with its key. `snapshot`: lines for readers that come after their entries were trimmed; None:
        unchanged. `is_new`: it replaces the stored one.
        """
        key, seal = self.keys.facts(node), self.verifier.seal_facts
        sealed = "" if snapshot is None else seal(self.keys.recorders, node, snapshot)
        args = [newest, seal(key, node, batch), node, sealed, int(bool(sealed) and is_new)]
        args += [FACTS_TTL_S, FACTS_ENTRIES, FACTS_BYTES, _NEWEST_PAGE, self._known_snapshot]
        is_added, answer, stored = self.run_script(scripts.APPEND_FACTS, *args, at={"facts": key})
        if is_added:
            return Appended(text_of(answer), self._is_valid_snapshot(node, stored))
        return self._entries(node, answer)

    def _is_valid_snapshot(self, node: str, stored: bytes | int | None) -> bool:
        """Whether the stored snapshot is valid; a number stands for the one that was verified last."""
        if isinstance(stored, int):
            return True
        is_valid = self.verifier.facts(self.keys.recorders, node, stored) is not None
        # SHA-1, as the script computes it: identifies the value, and protects nothing.
        self._known_snapshot = hashlib.sha1(stored, usedforsecurity=False).hexdigest() if stored and is_valid else ""
        return is_valid

    def read_facts(self, node: str, after: str) -> Sequence[FactEntry]:
        """Return the next entries of a node's stream after this id; from the oldest one on if it was trimmed."""
        raw = self.run_script(scripts.READ_FACTS, after, _PAGE, at={"facts": self.keys.facts(node)})
        return self._entries(node, raw)

    def _entries(self, node: str, raw: Sequence[Any]) -> Sequence[FactEntry]:
        key = self.keys.facts(node)
        # A damaged entry may have fewer fields; "-" is no valid record.
        return [
            FactEntry(text_of(id), self.verifier.facts(key, node, fields[3] if len(fields) > 3 else b"-"))
            for id, fields in raw
        ]

    def recorders(self) -> dict[str, FactBatch | None]:
        """Return the snapshots of all nodes that recorded facts, by name with key; None: not sealed with our token."""
        name, before = self.keys.recorders, self._recorders
        raws = pairs(self.run_script(scripts.READ_RECORDERS))
        self._recorders = {
            node: before[node]
            if node in before and before[node][0] == raw
            else (raw, self.verifier.facts(name, node, raw))
            for node, raw in raws.items()
        }
        return {node: batch for node, (_, batch) in self._recorders.items()}

    # -- rendezvous of process groups ---------------------------------------------------------------------------

    def group_prefix(self, plan: RoundPlan, lane: int) -> str:
        """Return the prefix of a group's keys."""
        return self.keys.group(plan, lane)

    def group_set(self, key: str, value: bytes) -> None:
        self.call(lambda: self._redis.set(key, self.verifier.seal_value(key, value), ex=GROUP_TTL_S))

    def group_get(self, keys: list[str]) -> list[bytes | None]:
        raws = cast("list[bytes | None]", self.call(lambda: self._redis.mget(keys)))
        return [self.verifier.value(key, raw) for key, raw in zip(keys, raws, strict=True)]

    def group_add(self, key: str, amount: int) -> int:
        operation = f"{key}:{uuid.uuid4().hex}"
        return int(self.run_script(scripts.ADD_ONCE, amount, GROUP_TTL_S, at={"counter": key, "operation": operation}))

    def group_delete(self, key: str) -> bool:
        return bool(self.call(lambda: self._redis.delete(key)))

    def close(self) -> None:
        self._redis.connection_pool.disconnect()
        self._redis.close()
