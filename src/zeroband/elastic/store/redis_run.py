"""A run's records in Redis: their keys, how Redis is asked, and what nodes tell each other there that decides nothing.

May be called from any thread. Raises StoreLost when Redis does not answer in time, and ConfigError when it refuses.
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
from zeroband.elastic.store.connection import (
    StoreScript,
    connect,
    forget_connections,
    is_refusal,
    is_unfit,
)
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
"""At most so much of what a node recorded is kept; the newest stays."""

PAUSE_MIN_S, PAUSE_MAX_S = 0.02, 0.5
REMIND_S = 5.0

REFUSES_S = 5.0
"""Who gives nothing but errors for so long, before a run was seen to work there, is taken to do so for good."""

_SELF_TEST_TTL_S = 60

_PAGE, _LOOKED = 64, 16
"""Entries of facts that are read at once, and that are looked at to find one that counts."""

_log = get_logger(__name__)


class Appended(NamedTuple):
    """An entry was added to a node's stream of facts."""

    id: str
    is_known: bool
    """Whether the node is listed among those that recorded something."""


class FactEntry(NamedTuple):
    """An entry of a node's stream of facts."""

    id: str
    batch: FactBatch | None
    """None: it does not count."""


class RedisRun:
    """The records of one run in one Redis.

    `key`: of the run, made of its token; None: it has none. `retry_s`: how long a call is retried, with jittered
    back-off, before it raises StoreLost; one attempt takes no longer than `answer_s`. `before_retry`: called before
    every further attempt; what it raises ends the call.
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
        """Whether a run was seen to work there."""
        self._refused_since_s: float | None = None
        """Since when there were nothing but errors for answers; None: there is no answer, or a good one."""
        self._known_word = ""
        """Digest of what stands of the node whose facts are added, as it was looked at last and counts."""
        self._recorders: dict[str, tuple[bytes, FactBatch | None]] = {}
        """What stood of each node when it was read last, with the record that it was read from."""
        self._scripts: dict[str, StoreScript] = {}
        """By their texts."""

    # -- how Redis is asked -----------------------------------------------------------------------------------

    def call(self, call: Callable[[], Any], retry_s: float | None = None) -> Any:
        """What a call of Redis gives, once it does."""
        retry_s = self._retry_s if retry_s is None else retry_s
        self._find_way()
        pauses = Backoff(PAUSE_MIN_S, PAUSE_MAX_S, jitter=0.5)  # members that lost it together come back apart
        started_at_s = reminded_at_s = time.monotonic()
        while True:
            try:
                answer = call()
            except (redis.RedisError, OSError) as error:
                if isinstance(error, redis.DataError):
                    raise  # a mistake of ours; what the store answers, whatever it is, may be another answer later
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
        """Why a server that answers does not do what was asked; None: it does not answer, or will soon.

        Raises ConfigError where that is for good. Once a run was seen to work there, its settings may come back.
        """
        is_garbled = self._has_answered and isinstance(error, redis.InvalidResponse)  # on its way from a Redis
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

    def _find_way(self) -> None:
        """Called before a request: find the server to ask, if it is not known yet."""

    def _note_silence(self, silent_s: float) -> None:
        """Called after a failed attempt. `silent_s`: time since the last answer."""

    def run_script(
        self,
        script: Script,
        *args: str | bytes | int,
        retry_s: float | None = None,
        wait: Sequence[str | int] = (),
        at: Mapping[str, str] | None = None,
    ) -> Any:
        """The result of a script; says which keys it found to be of a wrong kind.

        `wait`: a command before it. `at`: where those of its keys are of which a run has more than one, by their names.
        """
        keys = [(at or {}).get(name) or getattr(self.keys, name) for name in script.keys]
        run = self._bound(script)
        mended, result = self.call(lambda: run(keys=keys, args=args, wait=wait), retry_s)
        for key in mended:
            fields = {"key": text_of(key)}
            _log.warning("a key of the store was of a wrong kind and has been deleted", extra={"fields": fields})
        return result

    def _bound(self, script: Script) -> StoreScript:
        """A script on this run's server; it also says which keys it mended."""
        if script.text not in self._scripts:
            self._scripts[script.text] = self._redis.script(script.text, (list, script.answer))
        return self._scripts[script.text]

    def require_usable(self, *, retry_s: float) -> None:
        """Have Redis do once all that a run asks of it: from then on what it refuses may come back, and is waited for.

        Raises ConfigError where it refuses any of it, and StoreLost.
        """
        keys, self_test = self.keys.scratch(), self._bound(scripts.SELF_TEST)
        wait = ("XREAD", "BLOCK", 1, "COUNT", 1, "STREAMS", keys[-1], "0-0")

        def ask() -> None:
            self_test.load()
            _, refusal = self_test(keys=keys, args=[_SELF_TEST_TTL_S], wait=wait)
            if isinstance(refusal, redis.ResponseError):
                raise refusal

        self._is_proven = False
        self.call(ask, retry_s)
        self._is_proven = True

    def trust_address(self) -> None:
        """Take no refusal for final any more: a run was seen to work with this store."""
        self._is_proven = True

    # -- checkpoints --------------------------------------------------------------------------------------------

    def say_saving(self, attempt: str, node: str, word: str, *, retry_s: float) -> None:
        """Tell the other writers of a checkpoint something; only the newest word of a node counts.

        `node`: its name with its key.
        """
        key = self.keys.saving(attempt)
        sealed = self.verifier.seal_saving(key, node, word)
        self.run_script(scripts.SAY, node, sealed, SPENT_TTL_S, at={"said": key}, retry_s=retry_s)

    def saving(self, attempt: str, *, retry_s: float) -> dict[str, str]:
        """What the writers of a checkpoint last said, by node id."""
        key = self.keys.saving(attempt)
        said = pairs(self.run_script(scripts.READ_SAID, at={"said": key}, retry_s=retry_s))
        return self.verifier.saving(key, said, self._living_nodes())

    def _living_nodes(self) -> dict[str, str]:
        """The member that lives on each node, as far as it is known."""
        return {}

    # -- which checkpoints nodes have ------------------------------------------------------------------------------

    def tell_holding(self, member_id: str, holding: Holding, *, retry_s: float | None = None) -> None:
        """Tell the others what this node has at its ckpt.path; the newest word counts. It must hold a lease."""
        sealed = self.verifier.seal_holding(member_id, holding)
        self.run_script(scripts.TELL_HOLDING, member_id, sealed, RUN_TTL_S, retry_s=retry_s)

    def holdings(self, *, retry_s: float | None = None) -> dict[str, Holding]:
        """What nodes have at their ckpt.path, by member; some of these may have left."""
        said = pairs(self.run_script(scripts.READ_SAID, at={"said": self.keys.holdings}, retry_s=retry_s))
        return self.verifier.holdings(self.keys.holdings, said)

    # -- what nodes recorded ------------------------------------------------------------------------------------

    def append_facts(
        self, node: str, newest: str, batch: FactBatch, standing: FactBatch | None, *, is_new: bool = True
    ) -> Appended | Sequence[FactEntry]:
        """Add to the stream of a node, if its newest entry is the one of this id; empty: it has none.

        `node`: its name with its key.

        Else the newest ones, the newest first, from which a node sees what it has told: the answer to an earlier call
        may have been lost. `standing`: lines that readers get who come when their entries are gone; None: as before.
        `is_new`: in place of those that are there.
        """
        key, seal = self.keys.facts(node), self.verifier.seal_facts
        word = "" if standing is None else seal(self.keys.recorders, node, standing)
        args = [newest, seal(key, node, batch), node, word, int(bool(word) and is_new)]
        args += [FACTS_TTL_S, FACTS_ENTRIES, FACTS_BYTES, _LOOKED, self._known_word]
        is_added, said, listed = self.run_script(scripts.APPEND_FACTS, *args, at={"facts": key})
        if is_added:
            return Appended(text_of(said), self._knows_word(node, listed))
        return self._entries(node, said)

    def _knows_word(self, node: str, said: bytes | int | None) -> bool:
        """Whether a node is listed; the word is told in full only where it is not the one that was seen last."""
        if isinstance(said, int):
            return True
        is_known = self.verifier.facts(self.keys.recorders, node, said) is not None
        self._known_word = _sha1(said) if said and is_known else ""
        return is_known

    def read_facts(self, node: str, behind: str) -> Sequence[FactEntry]:
        """The next entries of a node's stream behind the one of this id; from the oldest on where it is gone."""
        raw = self.run_script(scripts.READ_FACTS, behind, _PAGE, at={"facts": self.keys.facts(node)})
        return self._entries(node, raw)

    def _entries(self, node: str, raw: Sequence[Any]) -> Sequence[FactEntry]:
        key = self.keys.facts(node)
        return [FactEntry(text_of(id), self.verifier.facts(key, node, _facts_of(parts))) for id, parts in raw]

    def recorders(self) -> dict[str, FactBatch | None]:
        """The nodes that recorded something, with what stands however long ago they did; None: not with our token.

        By their names with their keys.
        """
        name, before = self.keys.recorders, self._recorders
        said = pairs(self.run_script(scripts.READ_NODES))
        self._recorders = {
            node: before[node]
            if node in before and before[node][0] == raw
            else (raw, self.verifier.facts(name, node, raw))
            for node, raw in said.items()
        }
        return {node: batch for node, (_, batch) in self._recorders.items()}

    # -- rendezvous of process groups ---------------------------------------------------------------------------

    def group_prefix(self, plan: RoundPlan, lane: int) -> str:
        """Return what the keys of a lane's group begin with."""
        return self.keys.group(plan, lane)

    def group_set(self, key: str, value: bytes) -> None:
        self.call(lambda: self._redis.set(key, self.verifier.seal_value(key, value), ex=GROUP_TTL_S))

    def group_get(self, keys: list[str]) -> list[bytes | None]:
        raws = cast("list[bytes | None]", self.call(lambda: self._redis.mget(keys)))
        return [self.verifier.value(key, raw) for key, raw in zip(keys, raws, strict=True)]

    def group_add(self, key: str, amount: int) -> int:
        sign = f"{key}:{uuid.uuid4().hex}"
        return int(self.run_script(scripts.ADD_ONCE, amount, GROUP_TTL_S, at={"counter": key, "sign": sign}))

    def group_delete(self, key: str) -> bool:
        return bool(self.call(lambda: self._redis.delete(key)))

    def close(self) -> None:
        """Hang up."""
        self._redis.connection_pool.disconnect()
        self._redis.close()


def _sha1(said: bytes) -> str:
    """As a script computes it, to tell the same again."""
    return hashlib.sha1(said, usedforsecurity=False).hexdigest()


def _facts_of(parts: Sequence[bytes]) -> bytes:
    """The sealed part of an entry, whatever somebody wrote there."""
    return parts[3] if len(parts) > 3 else b"-"
