"""The run's store in Redis: start of a run, leases and rounds. With several stores, the one in use (`store_in_use`).

Every write that decides something is a compare-and-set in Lua (`scripts`), fenced by the plan that it builds on.
Records count only if a node of this run sealed them (`record_verifier`). Any thread.
"""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from zeroband.elastic.membership.ballots import Present, is_voted_for, may_leave_out
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.loss_record import LossRecord, reason_to_go_back
from zeroband.elastic.membership.orders import OperatorKey, Orders, is_legitimate
from zeroband.elastic.membership.proofs import is_undisputed, required_members
from zeroband.elastic.membership.records import (
    Attempt,
    Claim,
    Evidence,
    LinkRates,
    Peer,
    Ready,
    RestartPoint,
    RoundPlan,
    StoreTerm,
    Verdict,
    View,
)
from zeroband.elastic.store import scripts
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.interface import Store, record_of, require_equal
from zeroband.elastic.store.keys import HISTORY_LENGTH, ROUND_TTL_S, RUN_TTL_S, SPENT_TTL_S
from zeroband.elastic.store.patches import patch_of, patched, tag_of
from zeroband.elastic.store.record_verifier import EXCLUDES_MOST, NOT_VOTED_FOR
from zeroband.elastic.store.redis_run import PAUSE_MAX_S
from zeroband.elastic.store.seals import id_of
from zeroband.elastic.store.store_cache import RECORDS, Reader, StoreCache, pairs, text_of
from zeroband.elastic.store.store_in_use import StoreInUse, stamp_of
from zeroband.errors import ConfigError, JoinRefused, StoreLost

if TYPE_CHECKING:  # keeps the schema of a run out of the guardian
    from zeroband.config.schema import RollbackConfig

MEASURING_LIMIT, MEASURING_MS = 4, 10_000
"""Links of a run that are measured at a time, and the longest time for one measurement."""

_CAS_RETRIES = 8
"""Immediate retries of a compare-and-set while other nodes change its input."""

_CLAIM_PAUSE_S = 0.05
"""Longest pause of a joiner before it claims samples again; many may join at once."""

_AS_EXPECTED, _ANY = 2, "-"
"""Answer in place of a verdict that is the expected one; argument for "any verdict is the expected one"."""

_PATCH_MIN_CHARS = 4096
"""Shorter records are sent whole, which is faster than computing and applying a patch."""

_UNLIMITED = 1 << 31
"""More than the number of members."""

_FULL_READ_LEASES, _FULL_READ_MEMBERS = 6, 64
"""After this many lease times a view is read in full, which finds silent damage in the store. With more than
_FULL_READ_MEMBERS members the time grows in proportion."""


class _OwnRecord(NamedTuple):
    """A member's own record, written along with a read: that it is ready, or with a plan its vote."""

    raw: str
    plan: RoundPlan | None = None


def _with_prefix(prefix: str, records: Mapping[str, bytes]) -> dict[str, bytes]:
    """The records whose names start with `prefix`, by the rest of their names."""
    return {name.removeprefix(prefix): raw for name, raw in records.items() if name.startswith(prefix)}


class RedisStore(StoreInUse, Store):
    """The store of real runs.

    `url`: one address, or several separated by blanks or held by nodes; the one in use is found at the first call.
    `key`: made of the run's token; None: the run has none. `lease_s`: length of a lease. `retry_s`: time for which a
    call is retried with jittered back-off before it raises StoreLost; an attempt takes at most `answer_s`, by default
    one lease. `before_retry`: called before each further attempt; its exceptions end the call.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        key: RunKey | None = None,
        lease_s: float = 5.0,
        retry_s: float,
        answer_s: float | None = None,
        before_retry: Callable[[], None] = lambda: None,
    ) -> None:
        answer_s = min(max(1.0, lease_s), retry_s) if answer_s is None else answer_s
        super().__init__(
            *(url, run_id),
            key=key,
            lease_s=lease_s,
            retry_s=retry_s,
            answer_s=answer_s,
            before_retry=before_retry,
        )
        self._cache = StoreCache()
        self._cache_lock = threading.Lock()
        self._expected = b""
        """Record of the verdict that this node could write itself; the store need not send it."""
        self._member_id = ""
        """The member that uses this store; empty: none yet."""
        self._sealed_peer: tuple[str, Peer, str] | None = None
        """Member, address and sealed record of the last renewal; the same record is sent until the address changes."""
        self._shared: Mapping[str, str] | None = None
        """The settings that all nodes share; None: not compared yet."""
        self._newest: Verdict | None = None
        """The newest verdict that was accepted."""
        self._voted_on = ""
        """Plan of the newest vote through this store."""
        self._verified_round = -1
        """Round whose signatures are all verified, because a caller asked for it."""
        self._doubted = "", 0.0
        """The newest plan that is not accepted yet for want of evidence, and since when."""
        self.quorum = 0.5
        """Fraction of the weight that may continue without late members."""
        self.operator: OperatorKey | None = None
        """Signs orders given through this store; None: they are unsigned, as those of members."""
        self.on_left_out: Callable[[RoundPlan], object] = lambda plan: None
        """Called with a plan that was rejected because it excludes most living members."""
        self._renewed_ms, self._alive_at_renewal = 0, frozenset[str]()
        """Time of this node's last renewal by the store's clock, and the members alive then."""
        self._full_read_leases = _FULL_READ_LEASES * random.uniform(0.75, 1.25)  # spreads the members' full reads

    @property
    def session(self) -> str:
        return self.verifier.session

    @session.setter
    def session(self, session: str) -> None:
        self.verifier.session = session
        with self._cache_lock:
            self._era += 1
            self._cache = self._cache.in_another_session(self._era)

    @property
    def _silence_ms(self) -> int:
        """Without any renewal for this long, the store was unreachable: each guardian renews five times per lease."""
        return self._lease_ms // 2

    # -- the run ------------------------------------------------------------------------------------------------

    def found_or_match(self, shared: Mapping[str, str]) -> dict[str, str]:
        record = record_of(shared)
        deadline_s, has_another_token = time.monotonic() + self._lease_ms / 1000, False
        while True:
            is_first = time.monotonic() < deadline_s
            if has_another_token and not is_first:  # never overwrite a record sealed with another token
                raise JoinRefused("run.token", "another", "this one")
            args = [self.verifier.seal_run(record), RUN_TTL_S, self.verifier.rejected(self.keys.run), self._silence_ms]
            raw, is_alive = self.run_script(scripts.FOUND_OR_MATCH, *args, int(is_first))
            waits = is_first and bool(is_alive)
            theirs = self.verifier.run(self.keys.run, raw)
            if theirs is not None:
                require_equal(theirs, record)
                self._shared = record
                return record
            has_another_token = self._has_another_token(raw or self.verifier.rejected(self.keys.run))
            if has_another_token and not waits:
                raise JoinRefused("run.token", "another", "this one")
            if waits:
                time.sleep(min(PAUSE_MAX_S, self._lease_ms / 10_000))

    def _has_another_token(self, raw: bytes) -> bool:
        """Whether a record of the run was sealed with another token than this node's."""
        return id_of(raw) not in ("", self.verifier.token_check)

    def require_token(self) -> None:
        """Raise ConfigError if the run's record was sealed with another token than this one's."""
        raw, _, _ = self.run_script(scripts.READ, at={"record": self.keys.run})
        if raw and self._has_another_token(raw) and self.verifier.run(self.keys.run, raw) is None:
            raise ConfigError(
                "run.token: the nodes of this run have another one; give theirs, as run.token or ZERO_BAND_RUN__TOKEN"
            )

    def record(self) -> dict[str, str] | None:
        """Return the settings that the run's nodes share; None: there is no such run, or its record is forged."""
        raw, _, _ = self.run_script(scripts.READ, at={"record": self.keys.run})
        return self.verifier.run(self.keys.run, raw)

    def forget_dead_run(self) -> bool:
        return bool(self.run_script(scripts.FORGET_DEAD_RUN, self._lease_ms, self._silence_ms))

    def propose_restart_point(self, restart_point: RestartPoint, view: View) -> bool:
        verifier, keys = self.verifier, self.keys
        names = [keys.restart_point, keys.plan, keys.committed]
        before = [verifier.seal_restart_point(view.restart_point), verifier.seal_plan(view.plan)]
        before.append(verifier.seal_verdict(view.committed))
        args = [*before, verifier.seal_restart_point(restart_point), RUN_TTL_S, self._silence_ms]
        return bool(self.run_script(scripts.PROPOSE_RESTART_POINT, *args, *map(verifier.rejected, names)))

    def restore(self, known: StoreBackup) -> bool:
        keys, verifier, member = self.keys, self.verifier, known.member_id
        round = 0 if known.ready is None else known.ready.round
        ours = [
            *(verifier.seal_plan(known.plan), verifier.seal_verdict(known.committed)),
            *(verifier.seal_run(known.run), verifier.seal_orders(known.orders)),
            "" if known.ready is None else verifier.seal_ready(member, known.ready),
            "" if known.vote is None else verifier.seal_vote(member, *known.vote),
        ]
        places = [keys.plan, keys.committed, keys.run, keys.orders, f"{keys.ready(round)} {member}"]
        places.append(f"{keys.votes} {member}")
        args = [RUN_TTL_S, self._lease_ms, HISTORY_LENGTH, ROUND_TTL_S, member, *ours, *map(verifier.rejected, places)]
        args += [stamp_of(known.generation), "" if known.vote is None else known.vote[0].id]
        return self.run_script(scripts.RESTORE, *args, at=self.keys.of_round(round)) == 1

    # -- leases -------------------------------------------------------------------------------------------------

    def renew_lease(
        self, member_id: str, peer: Peer, *, first: bool = False, listed_version: int = 0
    ) -> dict[str, Peer] | None:
        args: list[str | bytes | int] = [member_id, self._lease_ms, self._silence_ms, int(first)]
        args += [self._seal_peer(member_id, peer), RUN_TTL_S]
        refuted, cache = b"", self._fork_cache()
        for _ in range(_CAS_RETRIES):
            cached = [refuted, cache.position, cache.alive_tag, cache.peers.revision]
            granted, against, *living, now_ms = self.run_script(scripts.RENEW_LEASE, *args, *cached)
            if granted:
                peers = self._update_living(cache, *living)
                self._renewed_ms, self._alive_at_renewal = int(now_ms), cache.alive
                return peers
            plan = self.verifier.plan(self.keys.plan, against, None)
            is_newer = plan is not None and plan.version > listed_version
            is_out = plan is not None and member_id not in plan.listed
            if plan is not None and is_newer and is_out and not self._is_usurped(plan, int(now_ms)):
                return None
            refuted = against
        raise StoreLost(f"{self.keys.plan} changes all the time; {member_id} could not renew its lease")

    def _seal_peer(self, member_id: str, peer: Peer) -> str:
        sealed = self._sealed_peer
        if sealed is None or sealed[:2] != (member_id, peer):
            sealed = self._sealed_peer = member_id, peer, self.verifier.seal_peer(member_id, peer)
        return sealed[2]

    def _is_usurped(self, plan: RoundPlan, now_ms: int) -> bool:
        """Whether one member opened this plan without several others while this node's lease cannot have expired.

        Then the node acquires its lease again; its trainer decides by the living members whether the plan is valid.
        """
        others = self._alive_at_renewal.difference(plan.members)
        remaining = len(self._alive_at_renewal) - len(others)
        return 0 <= now_ms - self._renewed_ms < self._lease_ms and remaining <= 1 < len(others)

    def _update_living(self, cache: StoreCache, revision: Sequence[Any], alive: Any, peers: Any) -> dict[str, Peer]:
        """Learn from a renewal's answer. Returns the living members."""
        cache.update_revision(*revision)
        cache.update_alive(alive)
        if cache.peers.update(peers, cache.revision, lambda new: self.verifier.peers(self.keys.peers, new)):
            self._add_stores_of(cache.peers.read)
        cache.view = None
        self._store_cache(cache)
        return {member: peer for member, peer in cache.peers.read.items() if member in cache.alive}

    def _living_nodes(self) -> dict[str, str]:
        with self._cache_lock:
            view = self._cache.view
        if view is None:
            return {}
        return {peer.node_id: member for member, peer in view.peers.items() if member in view.alive}

    def release_lease(self, member_id: str) -> None:
        self.run_script(scripts.END_LEASE, member_id, 1)

    def expire_lease(self, member_id: str) -> None:
        self.run_script(scripts.END_LEASE, member_id, 0)

    def lease_ends_ms(self) -> dict[str, int]:
        leases = self.call(lambda: self._redis.zrangebyscore(self.keys.leases, "-inf", "+inf", withscores=True))
        return {text_of(member): int(end) for member, end in leases if abs(end) < float("inf")}

    def is_renewed(self, before_ms: int, end_ms: int) -> bool:
        return 0 < end_ms - before_ms < self._silence_ms

    def announce_leaving(self, member_id: str) -> frozenset[str]:
        sealed = self.verifier.seal_leaving(member_id)
        alive, leaving = self.run_script(scripts.LEAVE, member_id, self._silence_ms, ROUND_TTL_S, sealed)
        return frozenset(map(text_of, alive)) - self.verifier.leaving(self.keys.leaving, pairs(leaving))

    # -- rounds -------------------------------------------------------------------------------------------------

    def view(self, round: int) -> View:
        self._verified_round = round
        return self._read_view(round)

    def await_change(
        self, round: int, seen: View | None, *, within_s: float, whole: bool = True, ends_with: RoundPlan | None = None
    ) -> View:
        wait_ms = int(1000 * min(within_s, self._answer_s / 2))
        return self._read_view(round, whole=whole, seen=seen, wait_ms=wait_ms, ends_with=ends_with)

    def announce_ready(self, member_id: str, ready: Ready, *, enough: int | None = None) -> View:
        self._member_id = member_id
        own = _OwnRecord(self.verifier.seal_ready(member_id, ready))
        enough_ready = _UNLIMITED if enough is None else enough
        return self._read_view(ready.round, own, whole=enough is None, enough_ready=enough_ready)

    def vote(self, plan: RoundPlan, member_id: str, digest: str, *, generation: StoreTerm | None = None) -> View:
        self._member_id, self._voted_on = member_id, plan.id
        own = _OwnRecord(self.verifier.seal_vote(member_id, plan, digest), plan)
        enough, stamp = len(plan.members), stamp_of(generation)
        return self._read_view(plan.round, own, whole=False, enough_votes=enough, stamp=stamp)

    def testify(self, plan: RoundPlan, member_id: str, evidence: Evidence, *, again: bool = False) -> bool:
        key, sealed = self.keys.attempt(plan.id), self.verifier.seal_evidence(member_id, plan, evidence)
        args = [plan.id, member_id, sealed, SPENT_TTL_S, self.verifier.rejected(f"{key} said {member_id}"), int(again)]
        return bool(self.run_script(scripts.TESTIFY, *args, at={"attempt": key}))

    def attempt(self, plan_id: str) -> Attempt | None:
        verifier, key = self.verifier, self.keys.attempt(plan_id)
        raw, failed, flat_votes, flat_kept, tag = self.run_script(scripts.READ_ATTEMPT, plan_id, at={"attempt": key})
        kept, votes = pairs(flat_kept), pairs(flat_votes)
        names = [self.keys.plan, self.keys.votes, self.keys.failed]
        if not raw:  # another plan has followed, whose proposal copied this one to the attempt's key
            names = [key, f"{key} vote", f"{key} failed"]
            raw, failed, votes = kept.get("plan"), kept.get("failed"), _with_prefix("vote ", kept)
        plan = verifier.past_plan(names[0], raw, plan_id)
        if plan is None:
            return None
        return Attempt(
            plan,
            verifier.votes(names[1], plan, votes),
            verifier.evidence(f"{key} said", plan, _with_prefix("said ", kept)),
            verifier.failure(names[2], plan, failed) or "",
            text_of(tag),
        )

    def _fork_cache(self) -> StoreCache:
        """Return a copy of the cache to update; an empty one if it is too old."""
        with self._cache_lock:
            cache, now_s = self._cache, time.monotonic()
            leases = self._full_read_leases * max(1.0, len(cache.alive) / _FULL_READ_MEMBERS)
            if cache.era != self._era or now_s - cache.began_at_s > leases * self._lease_ms / 1000:
                cache = self._cache = StoreCache(era=self._era, began_at_s=now_s)
            return cache.fork()

    def _store_cache(self, new: StoreCache) -> None:
        """Make this the cache, unless another thread has stored a newer one."""
        with self._cache_lock:
            old = self._cache
            is_newer = new.is_set_back or new.counter_id != old.counter_id or new.revision >= old.revision
            if new.era == old.era and is_newer:
                self._cache = new

    def _read_view(
        self,
        round: int,
        own: _OwnRecord | None = None,
        *,
        whole: bool = True,
        enough_ready: int = _UNLIMITED,
        enough_votes: int = _UNLIMITED,
        seen: View | None = None,
        wait_ms: int = 0,
        stamp: str | None = None,
        ends_with: RoundPlan | None = None,
    ) -> View:
        """Read a view in one round trip.

        `own`: written first, if the store is in the generation `stamp`; None: in the one in use. `wait_ms`: time to
        wait for a change, if `seen` is the newest view. `ends_with`: as in `await_change`.
        """
        keys, cache, expected = self.keys, self._fork_cache(), self._expected
        cache.select_round(round)
        args: list[str | bytes | int] = [self._silence_ms, cache.position, *map(cache.tag, RECORDS)]
        args += [cache.alive_tag, cache.ready.revision, cache.peers.revision, cache.plan_id, cache.votes.revision]
        args += [int(whole), enough_ready, enough_votes, self._member_id]
        args += [cache.ready.tag(self._member_id), cache.votes.tag(self._member_id)]
        # A verdict that only ends this wait need not be transferred: the caller reads it with its next view.
        skips_verdict = ends_with is not None and cache.plan == ends_with and id_of(expected) != ends_with.id
        args.append(_ANY if skips_verdict else tag_of(expected))
        if own is not None:
            args += [own.raw, ROUND_TTL_S, self._stamp if stamp is None else stamp]
            args.append("" if own.plan is None else own.plan.id)
        waits = wait_ms > 0 and seen is not None and seen is cache.view  # else another thread has read a newer one
        last_id = f"{cache.revision}-0"
        wait = ("XREAD", "BLOCK", wait_ms, "COUNT", 1, "STREAMS", keys.wakeups, last_id) if waits else ()
        answer = self.run_script(scripts.VIEW, *args, wait=wait, at=self.keys.of_round(round))
        if skips_verdict and answer[2] == _AS_EXPECTED and (newest := self._fork_cache().view) is not None:
            return newest  # another thread may have read a newer one meanwhile
        try:
            answer[1:3] = self._apply_patches(cache, answer[1], answer[2], expected)
        except ValueError:  # damaged; without cached records the store sends them whole
            cache.records, cache.view = {}, None
            self._store_cache(cache)
            return self._read_view(
                round, own, whole=whole, enough_ready=enough_ready, enough_votes=enough_votes, stamp=stamp
            )
        view = self._update_view(cache, round, answer)
        self._store_cache(cache)
        return self._read_view(round, whole=whole) if cache.peers.unseen else view  # some peers were deleted

    def _apply_patches(self, cache: StoreCache, plan: Any, committed: Any, expected: bytes) -> tuple[Any, Any]:
        """Rebuild the plan and the verdict from the cache. Raises ValueError if a result's seal does not verify."""
        if isinstance(plan, list):
            plan = patched(cache.records.get("plan") or b"", plan[0])
            self.verifier.require_sealed(plan, "plan")
        if isinstance(committed, list):
            committed = patched(cache.records.get("committed") or b"", committed[0])
            self.verifier.require_sealed(committed, "verdict")
        return plan, expected if committed == _AS_EXPECTED else committed

    def _update_view(self, cache: StoreCache, round: int, answer: Sequence[Any]) -> View:
        """Learn from the answer. Returns the view, which is the previous object if nothing changed."""
        keys, verifier = self.keys, self.verifier
        revision, *records, alive, ready, peers, votes, is_settling, own_ready, own_vote = answer
        cache.update_revision(*revision)
        has_changed = cache.update_alive(alive)
        must_verify = not cache.is_verified and self._verifies_all(round)
        if cache.update_records(records) or cache.view is None or cache.is_doubted or must_verify:
            self._parse_records(cache)
        plan, ready_key = cache.plan, keys.ready(round)
        read_ready, read_votes = self._readers(cache, round)
        if must_verify:
            has_changed |= cache.ready.verify(read_ready)
            has_changed |= cache.votes.verify(read_votes)
        if cache.peers.update(peers, cache.revision, lambda raw: verifier.peers(keys.peers, raw)):
            self._add_stores_of(cache.peers.read)
            has_changed = True
        has_changed |= cache.ready.update(ready, cache.revision, read_ready)
        has_changed |= cache.votes.update(votes, cache.revision, read_votes)
        if self._member_id:
            has_changed |= cache.ready.update_own(self._member_id, own_ready, read_ready)
            has_changed |= cache.votes.update_own(self._member_id, own_vote, read_votes)
        settles = bool(is_settling) or cache.is_doubted
        if cache.view is not None and not has_changed and cache.view.is_settling == settles:
            return cache.view
        view = View(
            plan=plan,
            committed=cache.committed,
            alive=cache.alive,
            ready=cache.ready.read,
            votes=cache.votes.read if plan is not None else {},
            failed=cache.failed,
            peers=cache.peers.read,
            is_known=cache.is_known,
            is_settling=settles,
            orders=cache.orders,
            restart_point=cache.restart_point,
            unseen_ready=cache.ready.unseen,
            unseen_votes=cache.votes.unseen if plan is not None else 0,
            generation=cache.generation,
            refused={m: why for m in cache.ready.rejected if (why := verifier.malformed(f"{ready_key} {m}"))},
            is_proven=cache.is_verified,
        )
        cache.view = view.counted()
        return cache.view

    def _readers(self, cache: StoreCache, round: int) -> tuple[Reader[Ready], Reader[str]]:
        """Return the parsers of `Ready` records and of votes, for the plan in this cache."""
        verifier, keys, plan, trusted = self.verifier, self.keys, cache.plan, self._trusted(cache)
        voters = frozenset[str]() if plan is None else trusted & required_members(plan)

        def read_ready(raw: Mapping[str, bytes]) -> dict[str, Ready]:
            cache.ready.is_verified &= not raw.keys() & trusted
            return verifier.ready(keys.ready(round), round, raw, trusted)

        def read_votes(raw: Mapping[str, bytes]) -> dict[str, str]:
            cache.votes.is_verified &= not raw.keys() & voters
            return verifier.votes(keys.votes, plan, raw, voters)

        return read_ready, read_votes

    def _verifies_all(self, round: int | None) -> bool:
        return round == self._verified_round or self.verifier.verifies_all

    def _trusted(self, cache: StoreCache) -> frozenset[str]:
        """Members of the previous round whose signatures need not be verified, since this node takes part with them.

        Each of them rejects what is forged in its own name.
        """
        committed = cache.committed
        if committed is None or cache.round is None or self._member_id not in committed.members:
            return frozenset()
        is_next = 0 <= cache.round - committed.round <= 1
        if not is_next or self._verifies_all(cache.round):
            return frozenset()
        return frozenset(committed.members) - {self._member_id}

    def _parse_records(self, cache: StoreCache) -> None:
        """Parse the records that exist once per run; some are valid only together with others."""
        keys, verifier, raw = self.keys, self.verifier, cache.records.get
        cache.is_doubted = False
        committed = self._accept_verdict(cache, verifier.verdict(keys.committed, raw("committed")))
        cache.orders = verifier.orders(keys.orders, raw("orders"))
        cache.committed, cached_plan = committed, cache.plan
        trusted, verifies_all = self._trusted(cache), self._verifies_all(cache.round)

        def is_trusted(plan: RoundPlan) -> bool:
            is_cached = plan == cached_plan
            is_unverified = cache.is_plan_trusted if is_cached else is_undisputed(plan, self._member_id, trusted)
            cache.is_plan_trusted = is_unverified and not verifies_all
            return cache.is_plan_trusted or (is_cached and not verifies_all)  # a cached one was verified before

        plan = verifier.plan(keys.plan, raw("plan"), committed, is_trusted=is_trusted)
        cache.is_plan_trusted &= plan is not None
        before = committed or self._newest
        if plan is not None and before is not None and plan.round > before.round:
            plan = self._accept_plan(cache, plan, before)
        if plan != cache.plan:
            cache.forget_votes()
        cache.plan, cache.view = plan, None
        cache.failed = verifier.failure(keys.failed, plan, raw("failed"))
        cache.is_known = verifier.run(keys.run, raw("run")) is not None
        cache.generation = verifier.generation(keys.generation, raw("generation")) if self.generation else None
        is_member = committed is not None and self._member_id in committed.plan.listed
        restart_point = verifier.restart_point(keys.restart_point, raw("restart_point"), committed)
        cache.restart_point = None if is_member else restart_point  # the run is alive: this member is

    def _accept_verdict(self, cache: StoreCache, verdict: Verdict | None) -> Verdict | None:
        """Return the verdict if its members voted for it; else the previous one, and the view settles for a lease.

        A member of the round compared it with its own vote. A node outside the round, such as a joiner, counts the
        members' votes. With one store, a member listed in a verdict on which it never voted knows that it is forged.
        """
        before, own = self._newest, self._member_id
        if verdict is None or (before is not None and verdict.round <= before.round):
            return verdict
        has_voted = self.verifier.is_expected(verdict) or verdict.plan.id == self._voted_on
        name, raw = self.keys.committed, cache.records["committed"] or b""
        listed = before.plan.listed if before is not None else ()
        if has_voted or (before is None and not self.verifier.can_sign):
            self._newest = verdict
            return verdict
        if own in listed and own in verdict.members and not self.has_several:
            self.verifier.reject(name, raw, NOT_VOTED_FOR)
            return None
        if before is None or own in listed:
            if not self.verifier.is_signed_by_proposer(name, raw, verdict.plan):
                return None
            is_voted = self._is_voted_for(cache, verdict, verdict.members if before is None else before.members)
            takes_part = verdict.members if is_voted else cache.alive
            may_go_on = before is None or self._may_leave_out(cache, verdict.plan, before, takes_part)
            if may_go_on is False:
                self._reject_exclusion(cache, "committed", verdict.plan)
                return None
            if not (is_voted and may_go_on) and self._has_doubts(verdict.plan):
                cache.is_doubted = True
                return before
        self._newest = verdict
        return verdict

    def _accept_plan(self, cache: StoreCache, plan: RoundPlan, before: Verdict) -> RoundPlan | None:
        """Return the plan unless it wrongly excludes this member; the view settles while that is undecided."""
        may_go_on = self._may_leave_out(cache, plan, before, cache.alive)
        if may_go_on is False:
            self._reject_exclusion(cache, "plan", plan)
            return None
        if may_go_on is None and self._has_doubts(plan):
            cache.is_doubted = True
            return None
        return plan

    def _may_leave_out(
        self, cache: StoreCache, plan: RoundPlan, before: Verdict, takes_part: Collection[str]
    ) -> bool | None:
        """Apply `ballots.may_leave_out` to what this node sees."""
        key = self.keys.ready(plan.round)
        if cache.round == plan.round and self._member_id not in plan.members:
            self._verified_round = plan.round
            cache.ready.verify(lambda raw: self.verifier.ready(key, plan.round, raw))
        ready = cache.ready.read if cache.round == plan.round else {}
        here = Present(cache.alive, cache.peers.read, ready, self.quorum)
        return may_leave_out(plan, before, self._member_id, here, takes_part)

    def _reject_exclusion(self, cache: StoreCache, name: str, plan: RoundPlan) -> None:
        """Reject a record by which one member continues without most others, and report its plan."""
        if self.verifier.reject(getattr(self.keys, name), cache.records[name] or b"", EXCLUDES_MOST):
            self.on_left_out(plan)

    def _has_doubts(self, plan: RoundPlan) -> bool:
        """Whether this plan has been doubted for at most one lease."""
        now_s = time.monotonic()
        if self._doubted[0] != plan.id:
            self._doubted = plan.id, now_s
        return 1000 * (now_s - self._doubted[1]) <= self._lease_ms

    def _is_voted_for(self, cache: StoreCache, verdict: Verdict, members: Collection[str]) -> bool:
        """Whether the store has the votes of most of these members for the verdict."""
        key = self.keys.votes if cache.plan_id == verdict.plan.id else self.keys.last_votes
        votes = self.verifier.votes(key, verdict.plan, pairs(self.run_script(scripts.READ_HASH, at={"hash": key})))
        return is_voted_for(verdict, votes, {*members} - {self._member_id})

    def claim_samples(self, member_id: str, choose: Callable[[Mapping[str, Claim]], Claim]) -> Claim:
        deadline_s = time.monotonic() + self._lease_ms / 1000
        while time.monotonic() < deadline_s:
            flat = self.run_script(scripts.READ_HASH, at={"hash": self.keys.claims})
            fields = sorted(member + b" " + claim for member, claim in zip(flat[::2], flat[1::2], strict=True))
            known = hashlib.sha1(b" ".join(fields), usedforsecurity=False).hexdigest()
            claim = choose(self.verifier.claims(self.keys.claims, pairs(flat)))
            sealed = self.verifier.seal_claim(member_id, claim)
            if self.run_script(scripts.CLAIM, member_id, sealed, ROUND_TTL_S, known):
                return claim
            time.sleep(random.uniform(0.0, _CLAIM_PAUSE_S))
        raise StoreLost(f"{self.keys.claims} changes all the time; {member_id} could not claim samples")

    def claims(self) -> Mapping[str, Claim]:
        flat = self.run_script(scripts.READ_HASH, at={"hash": self.keys.claims})
        return self.verifier.claims(self.keys.claims, pairs(flat))

    def publish_links(self, member_id: str, links: LinkRates) -> None:
        sealed = self.verifier.seal_links(member_id, links)
        self.run_script(scripts.PUBLISH_LINKS, member_id, sealed, RUN_TTL_S)

    def acquire_measuring(self, member_id: str) -> bool:
        return bool(self.run_script(scripts.ACQUIRE_MEASURING, member_id, MEASURING_LIMIT, MEASURING_MS))

    def release_measuring(self, member_id: str) -> None:
        self.call(lambda: self._redis.zrem(self.keys.measuring, member_id))

    def links(self) -> Mapping[str, LinkRates]:
        keys, cache = self.keys, self._fork_cache()
        if cache.links.revision != cache.links_revision or cache.links.unseen:
            revision, links = self.run_script(scripts.READ_LINKS, cache.position, cache.links.revision)
            cache.update_revision(*revision)
            cache.links.update(links, cache.links_revision, lambda raw: self.verifier.links(keys.links, raw))
            cache.view = None  # it may be older than the revision that is now cached
            self._store_cache(cache)
        return cache.links.read

    def signed(self, plan: RoundPlan, member_id: str) -> RoundPlan:
        return self.verifier.signed(plan, member_id)

    def propose_plan(
        self,
        plan: RoundPlan,
        *,
        current: RoundPlan | None,
        generation: StoreTerm | None = None,
        heard: Attempt | None = None,
    ) -> bool:
        verifier, keys = self.verifier, self.keys
        before, after = verifier.seal_plan(current), verifier.seal_plan(plan)
        args = [before, plan.round, after, RUN_TTL_S, plan.orders]
        args += [self._silence_ms, *map(verifier.rejected, (keys.plan, keys.committed, keys.orders))]
        args += [stamp_of(generation), _patch(before, after), "" if heard is None else heard.tag, SPENT_TTL_S]
        attempt = keys.attempt("" if current is None else current.id)
        return bool(self.run_script(scripts.PROPOSE_PLAN, *args, at={"attempt": attempt}))

    def report_failure(self, plan: RoundPlan, reason: str) -> bool:
        verifier, keys = self.verifier, self.keys
        sealed = verifier.seal_failure(plan, reason, by=self._member_id)
        args = [plan.version, sealed, ROUND_TTL_S, verifier.rejected(keys.committed), verifier.rejected(keys.failed)]
        return bool(self.run_script(scripts.FAIL, *args, plan.id))

    def expect_verdict(self, verdict: Verdict) -> None:
        self._expected = self.verifier.expect(verdict)

    def propose_verdict(self, verdict: Verdict, *, generation: StoreTerm | None = None) -> bool:
        plan, keys, verifier = verdict.plan, self.keys, self.verifier
        before, after = verifier.seal_verdict(self._fork_cache().committed), verifier.seal_verdict(verdict)
        args = [verifier.seal_plan(plan), verdict.round, after, RUN_TTL_S, HISTORY_LENGTH, self._silence_ms]
        args += [SPENT_TTL_S, verifier.rejected(keys.committed), verifier.rejected(keys.failed), stamp_of(generation)]
        shared = self._shared if verdict.session != self.session else None
        args += [_patch(before, after), "" if shared is None else verifier.seal_run(shared, verdict.sessions)]
        for _ in range(_CAS_RETRIES):
            outcome = self.run_script(
                scripts.COMMIT, *args, *self._fulfilled_orders(plan), *plan.listed, at=self.keys.of_round(verdict.round)
            )
            if outcome != 2:
                return bool(outcome)
        return False

    def _fulfilled_orders(self, plan: RoundPlan) -> tuple[bytes, str]:
        """The orders before and after a round that fulfils them; empty if it fulfils none."""
        if plan.rollback is None:
            return b"", ""
        raw, orders, _ = self._read_orders()
        if orders.rollback != plan.rollback:
            return b"", ""
        return raw, self.verifier.seal_orders(replace(orders, rollback=None, version=orders.version + 1))

    def _read_orders(self) -> tuple[bytes, Orders, int]:
        """The orders as stored and as valid, and the version under which the current plan was opened."""
        verifier, keys = self.verifier, self.keys
        raw, plan, committed = self.run_script(scripts.READ, at={"record": keys.orders})
        current = verifier.plan(keys.plan, plan, verifier.verdict(keys.committed, committed))
        return raw or b"", verifier.orders(keys.orders, raw), 0 if current is None else current.orders

    def take_orders_of(self, operator: str, run_id: str, rollback: RollbackConfig | None) -> None:
        """Accept only orders that follow from what the operator with this public key signed.

        `rollback`: the run's configuration, by which members order a rollback themselves after a bad loss.
        """

        def calls_for_return(round: int) -> bool:
            newest = self._newest
            if newest is None or newest.round != round:
                return False
            return bool(reason_to_go_back(LossRecord.of(newest.record), rollback))

        self.verifier.accepts_orders = lambda orders, before: is_legitimate(
            orders, before, operator, run_id, calls_for_return
        )

    def history(self) -> list[Verdict]:
        raw = self.run_script(scripts.READ_HISTORY)
        return self.verifier.past_verdicts(self.keys.history, cast("list[bytes]", raw)[::-1])

    def give_orders(self, change: Callable[[Orders], Orders]) -> Orders:
        deadline_s = time.monotonic() + self._lease_ms / 1000
        while True:
            raw, orders, newest = self._read_orders()
            if orders.version < newest:  # the store lost some; members restore them
                if time.monotonic() < deadline_s:
                    time.sleep(PAUSE_MAX_S)
                    continue
                orders = replace(orders, version=newest)
            changed = change(orders) if self.operator is None else self.operator.changed(orders, change)
            sealed = self.verifier.seal_orders(changed)
            if changed == orders or self.run_script(scripts.SET_ORDERS, raw, sealed, RUN_TTL_S):
                return changed


def _patch(before: str, after: str) -> str:
    return patch_of(before, after) if len(after) >= _PATCH_MIN_CHARS else ""
