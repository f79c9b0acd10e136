"""The only file that speaks to Redis: every key, every time to live; what runs inside it is in `scripts`.

All writes that decide something are compare-and-set, fenced by the opening that they build on. May be called from any
thread. Raises StoreLost when Redis does not answer within `patience_s`, and ConfigError when it refuses this node.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from zeroband.elastic import scripts
from zeroband.elastic.beginning import Beginning, beginning_from
from zeroband.elastic.connection import connect, forget_connections, is_refusal, is_temporary
from zeroband.elastic.epoch import (
    Opening,
    Peer,
    Ready,
    Verdict,
    View,
    to_json,
)
from zeroband.elastic.orders import Orders
from zeroband.elastic.records import opening_from, peer_from, ready_from, verdict_from
from zeroband.errors import ConfigError, JoinRefused, StoreLost
from zeroband.observe.log import get_logger

PROTOCOL = 7
"""Version of what nodes tell one another: the records below, and what contributions, journals and states mean.

Nodes with another one are refused at join.
"""

RUN_TTL_S = 30 * 24 * 3600
"""Life of the run's own record after its last write."""

ROUND_TTL_S = 7 * 24 * 3600
"""Life of what belongs to one round: longer than any pause a run may sit through."""

SPENT_TTL_S = 3600
"""Life of what belonged to a round that is committed."""

GROUP_TTL_S = 3600
"""Life of the keys through which the processes of one group find each other."""

HISTORY_LENGTH = 1000
"""Verdicts kept for readers of the run's history."""

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 0.5
_REMIND_S = 5.0

_log = get_logger(__name__)


class Keys:
    """Every key of a run. Hash tags keep a run on one shard of a cluster."""

    def __init__(self, run_id: str) -> None:
        self.prefix = f"zeroband:{{{run_id}}}"
        self.run = f"{self.prefix}:run"  # hash: what all nodes must share
        self.leases = f"{self.prefix}:leases"  # sorted set: member -> when its lease ends, in ms of the store's clock
        self.clock = f"{self.prefix}:clock"  # hash: last renewal, end of settling, id of the current opening
        self.peers = f"{self.prefix}:peers"  # hash: member -> where it is and whom it does not reach
        self.opening = f"{self.prefix}:opening"  # string: the current opening
        self.committed = f"{self.prefix}:committed"  # string: the newest verdict
        self.leaving = f"{self.prefix}:leaving"  # hash: members that are on their way out
        self.beginning = f"{self.prefix}:beginning"  # string: on which checkpoint the run is to begin again
        self.orders = f"{self.prefix}:orders"  # hash: what operators want of the run
        self.history = f"{self.prefix}:history"  # list: the newest verdicts, newest first

    def ready(self, round: int) -> str:
        return f"{self.prefix}:ready:{round}"

    def votes(self, opening: Opening) -> str:
        return f"{self.prefix}:votes:{opening.id}"

    def failed(self, opening: Opening) -> str:
        return f"{self.prefix}:failed:{opening.id}"

    def group(self, opening: Opening, lane: int) -> str:
        """The members stand in it: a store that came back with old data may give an epoch's number twice."""
        members = hashlib.blake2b("/".join(opening.members).encode(), digest_size=6).hexdigest()
        return f"{self.prefix}:group:{opening.epoch}:{members}:{lane}"


@dataclass(frozen=True)
class Recollection:
    """What a member knows of its run, enough to bring it back into a store that lost it."""

    member_id: str
    run: Mapping[str, str] = field(default_factory=dict[str, str])
    """What all nodes must share."""
    opening: Opening | None = None
    committed: Verdict | None = None
    ready: Ready | None = None
    """The last that it announced."""
    vote: tuple[Opening, str] | None = None
    """The last that it gave."""
    orders: Orders = field(default_factory=Orders)


class Store:
    """A run's record in Redis.

    `lease_s`: life of a lease. `patience_s`: how long a call is retried, with jittered back-off, before it raises
    StoreLost; one attempt takes no longer than a lease. `before_retry`: called before every further attempt; what it
    raises ends the call.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        lease_s: float = 5.0,
        patience_s: float,
        before_retry: Callable[[], None] = lambda: None,
    ) -> None:
        self.keys = Keys(run_id)
        self._patience_s = patience_s
        self._before_retry = before_retry
        self._has_answered = False
        self._lease_ms = int(lease_s * 1000)
        self._redis = connect(url, timeout_s=min(max(1.0, lease_s), patience_s))
        register = self._redis.register_script
        self._view, self._open, self._commit = (
            register(script) for script in (scripts.VIEW, scripts.OPEN, scripts.COMMIT)
        )
        self._fail, self._renew, self._end_lease = (
            register(script) for script in (scripts.FAIL, scripts.RENEW, scripts.END_LEASE)
        )
        self._found, self._restore, self._order, self._add_once = (
            register(script) for script in (scripts.FOUND, scripts.RESTORE, scripts.ORDER, scripts.ADD_ONCE)
        )
        self._begin, self._clear, self._leave = (
            register(script) for script in (scripts.BEGIN, scripts.CLEAR, scripts.LEAVE)
        )

    @property
    def _silence_ms(self) -> int:
        """Without any renewal for so long, the store itself was out of reach: a guardian renews five times a lease."""
        return self._lease_ms // 2

    def reach(self, *, patience_s: float) -> None:
        """Have Redis answer once, with a patience of its own. Raises StoreLost, ConfigError."""
        self._call(self._redis.ping, patience_s)

    def _call(self, call: Callable[[], Any], patience_s: float | None = None) -> Any:
        patience_s = self._patience_s if patience_s is None else patience_s
        started_at_s, pause_s, reminded_at_s = time.monotonic(), _PAUSE_MIN_S, time.monotonic()
        while True:
            try:
                answer = call()
                self._has_answered = True
                return answer
            except Exception as error:
                refusal = is_refusal(error)
                if refusal is not None and not self._has_answered:  # later on, the server's settings may come back
                    raise ConfigError(refusal) from error
                if refusal is None and not is_temporary(error):
                    raise
                now_s = time.monotonic()
                if now_s + pause_s > started_at_s + patience_s:
                    message = f"Redis did not answer for {patience_s:g} s: {error}; check store.url"
                    raise StoreLost(message) from error
                if now_s - reminded_at_s > _REMIND_S:
                    reminded_at_s = now_s
                    _log.warning("Redis is out of reach; trying again", extra={"fields": {"error": str(error)}})
            forget_connections(self._redis)
            self._before_retry()
            time.sleep(random.uniform(0.5, 1.0) * pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    # -- the run ------------------------------------------------------------------------------------------------

    def found_or_match(self, shared: Mapping[str, str], token: str | None) -> dict[str, str]:
        """Write what the run's nodes must share, or compare with what the first node wrote.

        Returns the record, for a `Recollection`. Raises JoinRefused.
        """
        record = {"run.token": token_digest(token), "protocol": str(PROTOCOL), **shared}
        flat = [part for item in record.items() for part in item]
        differing = self._call(lambda: self._found(keys=[self.keys.run], args=[RUN_TTL_S, *flat]))
        if differing:
            key, theirs, ours = (_text(part) for part in differing)
            raise JoinRefused(key, theirs, ours) if key != "run.token" else JoinRefused(key, "another", "this one")
        return record

    def forget_dead_run(self) -> bool:
        """Have nodes that differ from those of a dead run go on with it; its rounds stay. False: it may still live.

        A lease that held when the store was last spoken to counts for another one from the first call on, so ask again
        during that time.
        """
        keys = [self.keys.run, self.keys.leases, self.keys.clock]
        return bool(self._call(lambda: self._clear(keys=keys, args=[self._lease_ms, self._silence_ms])))

    def propose_beginning(self, beginning: Beginning, view: View) -> bool:
        """Agree on a checkpoint to begin again with. False: something has changed since this view."""
        keys = [self.keys.beginning, self.keys.opening, self.keys.committed, self.keys.clock]
        before, opening, committed = view.beginning, view.opening, view.committed
        args: list[str | int] = [
            "" if before is None else before.to_json(),
            "" if opening is None else to_json(opening),
            -1 if committed is None else committed.round,
            *(beginning.to_json(), RUN_TTL_S),
        ]
        return bool(self._call(lambda: self._begin(keys=keys, args=args)))

    def restore(self, known: Recollection) -> bool:
        """Bring back what the store lost of the run; what it has that is newer stays. True: it had lost something."""
        keys = self.keys
        opening, ready, vote = known.opening, known.ready, known.vote
        args: list[str | int] = [
            *(RUN_TTL_S, self._lease_ms, HISTORY_LENGTH),
            *((to_json(opening), opening.id) if opening is not None else ("", "")),
            "" if known.committed is None else to_json(known.committed),
            known.member_id,
            "" if ready is None else to_json(ready),
            "" if vote is None else vote[1],
            ROUND_TTL_S,
            json.dumps(known.orders.to_fields()),
            *(part for item in known.run.items() for part in item),
        ]
        ready_key = keys.ready(0 if ready is None else ready.round)
        vote_key = keys.run if vote is None else keys.votes(vote[0])
        names = [keys.opening, keys.committed, keys.history, keys.clock, keys.run, ready_key, vote_key, keys.orders]
        return bool(self._call(lambda: self._restore(keys=names, args=args)))

    # -- leases -------------------------------------------------------------------------------------------------

    def renew_lease(self, member_id: str, peer: Peer, *, first: bool = False) -> dict[str, Peer] | None:
        """Keep a member counted alive for another lease, and publish where it is.

        Returns the living members. None: the run went on without it (the member is fenced).
        """
        keys = [self.keys.leases, self.keys.clock, self.keys.peers, self.keys.opening, self.keys.run]
        args = [member_id, self._lease_ms, self._silence_ms, int(first), to_json(peer), RUN_TTL_S]
        granted, peers = self._call(lambda: self._renew(keys=keys, args=args))
        return _peers(peers) if granted else None

    def release_lease(self, member_id: str) -> None:
        """Leave at once instead of by expiry."""
        self._call(lambda: self._end_lease(keys=[self.keys.leases, self.keys.peers], args=[member_id, 1]))

    def expire_lease(self, member_id: str) -> None:
        """Have a member's lease run out now: its guardian is known to be gone."""
        self._call(lambda: self._end_lease(keys=[self.keys.leases, self.keys.peers], args=[member_id, 0]))

    def lease_ends_ms(self) -> dict[str, int]:
        """When the members' leases end, by the store's clock; also of those that ran out."""
        leases = self._call(lambda: self._redis.zrangebyscore(self.keys.leases, "-inf", "+inf", withscores=True))
        return {_text(member): int(end) for member, end in leases}

    def is_renewed(self, before_ms: int, end_ms: int) -> bool:
        """Whether a lease that ended at the first time, and ends at the second one now, was renewed by its holder.

        The store by itself prolongs leases only after a silence, and so by more than that.
        """
        return 0 < end_ms - before_ms < self._silence_ms

    def say_leaving(self, member_id: str) -> frozenset[str]:
        """Note that a member is about to leave; the living ones that stay. Of several at once, the last sees none."""
        keys = [self.keys.leases, self.keys.clock, self.keys.leaving]
        staying = self._call(lambda: self._leave(keys=keys, args=[member_id, self._silence_ms, ROUND_TTL_S]))
        return frozenset(_text(member) for member in staying)

    # -- rounds -------------------------------------------------------------------------------------------------

    def view(self, round: int) -> View:
        """All that the rules need for `round`, read at one instant."""
        return self._look(round)

    def announce_ready(self, member_id: str, ready: Ready) -> View:
        """Say that a member stands at the boundary of a round, and look; the first word counts."""
        return self._look(ready.round, (self.keys.ready(ready.round), member_id, to_json(ready)))

    def vote(self, opening: Opening, member_id: str, digest: str) -> View:
        """Say which result a member holds for an opening, and look; the first word counts."""
        return self._look(opening.round, (self.keys.votes(opening), member_id, digest))

    def _look(self, round: int, said: tuple[str, str, str] | None = None) -> View:
        """`said`: key, member and word of what is written first, in the same round trip."""
        keys = self.keys
        names = [keys.opening, keys.committed, keys.leases, keys.clock, keys.peers, keys.run, keys.ready(round)]
        names += [keys.orders, keys.beginning]
        args: list[str | int] = [keys.prefix, self._silence_ms]
        if said is not None:
            names.append(said[0])
            args += [*said[1:], ROUND_TTL_S]
        opening, committed, alive, ready, votes, failed, peers, is_known, is_settling, orders, beginning = self._call(
            lambda: self._view(keys=names, args=args)
        )
        return View(
            opening=opening_from(json.loads(opening)) if opening else None,
            committed=verdict_from(json.loads(committed)) if committed else None,
            alive=frozenset(_text(member) for member in alive),
            ready={m: ready_from(json.loads(r)) for m, r in _pairs(ready).items()},
            votes=_pairs(votes),
            failed=_text(failed) if failed else None,
            peers=_peers(peers),
            is_known=bool(is_known),
            is_settling=bool(is_settling),
            orders=Orders.from_fields(_pairs(orders)),
            beginning=beginning_from(json.loads(beginning)) if beginning else None,
        )

    def propose_opening(self, opening: Opening, *, current: Opening | None) -> bool:
        """Make this the opening that follows the current one. False: another proposal was first."""
        args = ["" if current is None else to_json(current), opening.round, to_json(opening), opening.id, RUN_TTL_S]
        args.append(opening.orders)
        keys = [self.keys.opening, self.keys.committed, self.keys.clock, self.keys.orders]
        return bool(self._call(lambda: self._open(keys=keys, args=args)))

    def report_failure(self, opening: Opening, reason: str) -> bool:
        """Have an opening fail for everybody, so that the round is opened again. False: it was committed already."""
        keys, args = [self.keys.committed, self.keys.failed(opening)], [opening.version, reason, ROUND_TTL_S]
        return bool(self._call(lambda: self._fail(keys=keys, args=args)))

    def propose_verdict(self, verdict: Verdict) -> bool:
        """Commit a round if its opening is the current one and did not fail. False: it was settled already."""
        opening, keys = verdict.opening, self.keys
        args = [to_json(opening), verdict.round, to_json(verdict), RUN_TTL_S, HISTORY_LENGTH]
        args += [self._silence_ms, SPENT_TTL_S]
        names = [keys.opening, keys.committed, keys.history, keys.failed(opening), keys.leases, keys.peers, keys.clock]
        names += [keys.ready(verdict.round), keys.votes(opening), keys.orders]
        return bool(self._call(lambda: self._commit(keys=names, args=args)))

    def history(self) -> list[Verdict]:
        """The newest committed rounds, oldest first."""
        raw = cast("list[bytes]", self._call(lambda: self._redis.lrange(self.keys.history, 0, -1)))
        return [verdict_from(json.loads(record)) for record in reversed(raw)]

    def give_orders(self, change: Callable[[Orders], Orders]) -> Orders:
        """Change what operators want of the run, by a rule that is asked again when another was faster. Its result."""
        while True:
            orders = Orders.from_fields(_pairs_of(self._call(lambda: self._redis.hgetall(self.keys.orders))))
            changed = change(orders)
            args = [orders.version, RUN_TTL_S, *(part for item in changed.to_fields().items() for part in item)]
            if changed == orders or self._call(lambda: self._order(keys=[self.keys.orders], args=args)):  # noqa: B023
                return changed

    # -- rendezvous of process groups ---------------------------------------------------------------------------

    def group_set(self, key: str, value: bytes) -> None:
        self._call(lambda: self._redis.set(key, value, ex=GROUP_TTL_S))

    def group_get(self, keys: list[str]) -> list[bytes | None]:
        return self._call(lambda: self._redis.mget(keys))

    def group_add(self, key: str, amount: int) -> int:
        sign = f"{key}:{uuid.uuid4().hex}"
        return int(self._call(lambda: self._add_once(keys=[key, sign], args=[amount, GROUP_TTL_S])))

    def group_delete(self, key: str) -> bool:
        return bool(self._call(lambda: self._redis.delete(key)))

    def close(self) -> None:
        self._redis.close()


def token_digest(token: str | None) -> str:
    """What of a run's token reaches the store. A slow hash, so that the record does not give the token away."""
    if token is None:
        return "none"
    return hashlib.pbkdf2_hmac("sha256", token.encode(), b"zeroband run token", 100_000).hex()


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _pairs(flat: list[bytes]) -> dict[str, str]:
    return {_text(k): _text(v) for k, v in zip(flat[::2], flat[1::2], strict=True)}


def _pairs_of(fields: Mapping[bytes, bytes]) -> dict[str, str]:
    return {_text(k): _text(v) for k, v in fields.items()}


def _peers(flat: list[bytes]) -> dict[str, Peer]:
    return {member: peer_from(json.loads(record)) for member, record in _pairs(flat).items()}
