"""The store of a run in Redis, or in one of several: leases, rounds, and which one is in use.

All writes that decide something are compare-and-set, fenced by the opening that they build on; what runs inside Redis
is in `scripts`. What is found there counts if it was sealed by a node of this run (`judge`).
"""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from zeroband.config.store_url import address_of_node, addresses_in, are_of_nodes, beside, parse_store_url, place_of
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.records import (
    Evidence,
    LinkRates,
    Opening,
    Peer,
    Ready,
    RestartPoint,
    StoreTerm,
    Verdict,
    View,
)
from zeroband.elastic.membership.run_key import RunKey
from zeroband.elastic.membership.succession import (
    MOST_STORES,
    ForwardPointer,
    HandoverState,
    Line,
    Meeting,
    MemberReport,
    StoreProbe,
    are_different,
    in_use,
    is_nowhere_else,
    places_of_stores,
)
from zeroband.elastic.store import scripts
from zeroband.elastic.store.backup import StoreBackup
from zeroband.elastic.store.connection import (
    connect,
)
from zeroband.elastic.store.interface import Store, record_of, require_equal
from zeroband.elastic.store.keys import ROUND_TTL_S, RUN_TTL_S, SPENT_TTL_S
from zeroband.elastic.store.patches import patch_of, patched, tag_of
from zeroband.elastic.store.redis_run import PAUSE_MAX_S, REMIND_S, RedisRun
from zeroband.elastic.store.seals import id_of
from zeroband.elastic.store.store_cache import RECORDS, StoreCache, pairs, text_of
from zeroband.errors import ConfigError, JoinRefused, StoreLost
from zeroband.observe.log import get_logger

MEASURED_AT_ONCE, MEASURING_MS = 4, 10_000
"""At most so many links of a run are measured at one time, each for so long."""

HISTORY_LENGTH = 1000
"""Verdicts kept for readers of the run's history."""

_ASK_AGAIN = 8
"""Times that a compare-and-set is tried at once while somebody changes what it builds on."""

_EXPECTED, _ANY = 2, "-"
"""Told in place of a verdict that is the expected one; in place of the tag of that one: whichever it is."""

_SURVEY_S = 1.0
"""In which a store that the run may go to must answer."""
_FRESH_MS = 3000
"""So long counts what a member told a store that the run may go to; it tells it again every moment."""
_MEETING_LEASES = 12
"""So long stands what was written down of two lines that met: all members of both look once a lease."""
_ELSEWHERE_LEASES = 4
"""So long counts what a store was told that the run does not use; it is told once a lease."""

_NEVER = 1 << 31
"""More than members can be."""

_WHOLE_LEASES, _WHOLE_MEMBERS = 6, 64
"""A look takes nothing for known after so many leases, and after more of them in proportion where there are more
members than so many: what somebody damages without a trace is seen by then."""

_log = get_logger(__name__)


class _Said(NamedTuple):
    """What a member writes for itself: that it is ready, or with an opening its vote."""

    word: str
    opening: Opening | None = None


class RedisStore(RedisRun, Store):
    """The store of real runs.

    `url`: of several stores, with blanks between them or held by nodes, the one in use is found at the first call
    (`reach`).
    `key`: of the run, made of its token; None: it has none. `lease_s`: life of a lease. `patience_s`: how long a call
    is retried, with jittered back-off, before it raises StoreLost; one attempt takes no longer than a lease, or
    `answer_s`.
    `before_retry`: called before every further attempt; what it raises ends the call.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        key: RunKey | None = None,
        lease_s: float = 5.0,
        patience_s: float,
        answer_s: float | None = None,
        before_retry: Callable[[], None] = lambda: None,
    ) -> None:
        answer_s = min(max(1.0, lease_s), patience_s) if answer_s is None else answer_s
        listed = addresses_in(url) or (url,)
        super().__init__(
            listed[0], run_id, key=key, patience_s=patience_s, answer_s=answer_s, before_retry=before_retry
        )
        self._seen = StoreCache()
        self._seeing = threading.Lock()
        self._expected = b""
        """The verdict that this node could write itself, which need not be told."""
        self._own = ""
        """The member that speaks through this store; empty: none did yet."""
        self._era = 0
        """Grows with each session and each store: what was seen in one is not learned from in another."""
        self._shared: Mapping[str, str] | None = None
        """What all nodes share; None: this node has not compared it."""
        self._whole_leases = _WHOLE_LEASES * random.uniform(0.75, 1.25)  # not all members at one time
        self._lease_ms = int(lease_s * 1000)
        self._key, self._listed, self._are_of_nodes = key, listed, are_of_nodes(url)
        self.generation: StoreTerm | None = None
        """The one that the store in use is in, of several; None: it is the only one, or not found yet."""
        self.on_silence: Callable[[], None] = self.follow
        """Called while the store in use, of several, has been silent for a lease: finds another one, if it can."""
        self._following = threading.RLock()
        self._others: tuple[str, ...] = ()
        """Addresses of stores that are not listed, and that members hold or told of."""
        self._asked: dict[str, RedisStore] = {}
        """Those that were asked by themselves, by what is shown of their addresses."""
        self._ask = partial(RedisStore, run_id=run_id, key=key, lease_s=lease_s, patience_s=0.0, answer_s=_SURVEY_S)
        self._refusals: dict[str, str] = {}
        """Why stores that answered the last survey cannot serve a run, by what is shown of their addresses."""
        self._is_quiet_since_s: float | None = None
        self._said = "", 0.0
        """Why it waits to begin a run, and when that was said."""

    @property
    def session(self) -> str:
        """Session of the run that this node is in; records of another one do not count. Empty: it is in none yet."""
        return self.judge.session

    @session.setter
    def session(self, session: str) -> None:
        self.judge.session = session
        with self._seeing:
            self._era += 1
            self._seen = self._seen.in_another_session(self._era)

    @property
    def _silence_ms(self) -> int:
        """Without any renewal for so long, the store itself was out of reach: a guardian renews five times a lease."""
        return self._lease_ms // 2

    def reach(self, *, patience_s: float, least_stores: int = 1) -> None:
        """Have Redis do once what a run asks of it, with a patience of its own. Raises StoreLost, ConfigError.

        Of several stores, the one in use is found, or the first one is taken into use where all that are listed can
        serve a run and none is. `least_stores`: different ones that must be there for that.
        """
        if not self.has_several:
            self.require_usable(patience_s=patience_s)
            raw = self.call(lambda: self._redis.get(self.keys.elsewhere))
            if (told := self.judge.whereabouts(self.keys.elsewhere, raw)) is not None:
                raise ConfigError(
                    f"store.url names one of several stores of this run, which uses {told.store}: name all"
                )
            return
        until_s, self._said = time.monotonic() + patience_s, ("", time.monotonic())
        while self.generation is None:
            seen = self.survey()
            self._enter_newest(seen)
            if self.generation is not None:
                break
            if self._refusals and not self._are_of_nodes:  # a store of another node's may be replaced
                raise ConfigError(next(f"{shown}: {why}" for shown, why in self._refusals.items()))
            silent = self._silent(seen)
            found = [candidate for _, candidate in seen]
            sees_enough = bool(silent) or are_different(found, least_stores)
            if not silent and sees_enough and is_nowhere_else(found, None):
                first, candidate = seen[0]
                with suppress(StoreLost):  # the next look shows that it is gone
                    self._require_all_usable(seen)
                    first.begin(StoreTerm(1, candidate.store), None)
                self._is_quiet_since_s = time.monotonic()
                continue
            if time.monotonic() > until_s:
                raise StoreLost(self._why_not_reached(silent, sees_enough=sees_enough))
            self._say_waits(self._why_not_reached(silent, sees_enough=sees_enough))
            time.sleep(PAUSE_MAX_S)
        self._require_all_usable(self.survey())

    def _require_all_usable(self, seen: Sequence[tuple[RedisStore, StoreProbe]]) -> None:
        """Have each of these stores do once what a run asks of it. Says which of those that are not in use refuse.

        Raises StoreLost, and ConfigError where the one in use refuses, or any while none is.
        """
        for store, _ in seen:
            shown = _shown(store.address)
            try:
                store.require_usable(patience_s=_SURVEY_S)
            except ConfigError as error:
                if self.generation is None or shown == _shown(self.address):
                    raise ConfigError(f"{shown}: {error}") from error
                fields = {"store": shown, "why": str(error)}
                _log.warning("the run cannot go on in one of its stores", extra={"fields": fields})
            except StoreLost:
                if self.generation is None or shown == _shown(self.address):
                    raise

    def _say_waits(self, why: str) -> None:
        """Say why no run is begun here, where that is another reason than before and stays for a moment."""
        said, since_s = self._said
        if why != said and time.monotonic() - since_s > REMIND_S:
            self._said = why, time.monotonic()
            _log.warning("cannot start the run yet", extra={"fields": {"why": why}})

    def _why_not_reached(self, silent: Sequence[str], *, sees_enough: bool = True) -> str:
        if not sees_enough:
            return (
                "this node sees no store of another machine: it may be the first of the run, or cut off from all "
                "others, who go on; start another node of the run, or this one with --found if no other one lives"
            )
        if not silent:
            return "the stores of the run tell that its members go on with another one, which does not answer yet"
        key = "store.peers" if self._are_of_nodes else "store.url"
        why = self._refusals
        named = ", ".join(f"{shown} ({why[shown]})" if shown in why else shown for shown in silent)
        return (
            f"no store of {key} holds this run, and {len(silent)} of {len(self._listed)} do not answer, of which one "
            f"may hold it: {named}; start them, or take out of {key} those that are gone"
        )

    # -- several stores -----------------------------------------------------------------------------------------

    @property
    def has_several(self) -> bool:
        """Whether the run has several stores, as far as this node knows."""
        return self._are_of_nodes or len(self._listed) > 1 or self.generation is not None

    @property
    def candidates(self) -> tuple[RedisStore, ...]:
        """The stores that the run may use: those listed, then those found. Each is asked by itself."""
        with self._seeing:
            addresses = (*self._listed, *self._others, self.address)
            for shown, address in zip(map(_shown, addresses), addresses, strict=True):
                if shown not in self._asked:
                    self._asked[shown] = self._ask(address)
            return tuple(self._asked[shown] for shown in dict.fromkeys(map(_shown, addresses)))

    def survey(self, member_id: str = "", account: MemberReport | None = None) -> list[tuple[RedisStore, StoreProbe]]:
        """Ask all stores of the run at once; those that answer, in their order. `account`: is told to each of them.

        Those of which one of them tells are asked, too.
        """
        answers = dict[RedisStore, StoreProbe | None]()

        refusals = dict[str, str]()

        def ask(store: RedisStore) -> StoreProbe | None:
            try:
                return store.look_at_candidate(member_id, account)
            except ConfigError as error:
                refusals[_shown(store.address)] = str(error)
            except StoreLost:
                pass
            return None

        while unasked := [store for store in self.candidates if store not in answers]:
            with ThreadPoolExecutor(len(unasked), "survey") as pool:
                answers.update(zip(unasked, pool.map(ask, unasked), strict=True))
            for store, seen in answers.items():
                if seen is not None and seen.elsewhere is not None:
                    self._find(beside(store.address, seen.elsewhere.store))
        self._refusals = refusals
        return [(store, seen) for store in self.candidates if (seen := answers.get(store)) is not None]

    def _find(self, *addresses: str) -> None:
        """Ask these stores, too, from now on, and fewer of those that were found before."""
        with self._seeing:
            self._others = tuple(dict.fromkeys([*addresses, *self._others]))[:MOST_STORES]

    def _find_stores_of(self, peers: Mapping[str, Peer]) -> None:
        if self._are_of_nodes:
            places = [place_of(host, port) for host, port in places_of_stores(peers)]
            self._find(*map(address_of_node, places))

    def _silent(self, seen: Sequence[tuple[RedisStore, StoreProbe]]) -> list[str]:
        """The stores that are listed and do not answer."""
        answering = [_shown(store.address) for store, _ in seen]
        return [shown for shown in map(_shown, self._listed) if shown not in answering]

    def look_at_candidate(self, member_id: str, account: MemberReport | None) -> StoreProbe:
        """Look at this store as one that the run may go to. Raises StoreLost, ConfigError."""
        keys, judge = self.keys, self.judge
        word = "" if account is None else judge.seal_account(member_id, account)
        told = self.run_script(scripts.TELL_ACCOUNT, uuid.uuid4().hex, member_id, word, RUN_TTL_S, _FRESH_MS)
        id, generation, said, committed, elsewhere, met = told
        verdict = judge.verdict(keys.committed, committed)
        accounts = judge.accounts(keys.accounts, pairs(said))
        round = -1 if verdict is None else verdict.round
        return StoreProbe(
            *(text_of(id), judge.generation(keys.generation, generation), round, accounts),
            judge.whereabouts(keys.elsewhere, elsewhere),
            line=Line.of(verdict),
            meeting=judge.meeting(keys.meeting, met),
        )

    def tell_whereabouts(self, line: Line | None = None) -> None:
        """Tell the stores that are listed, and not in use, where the run goes on. Those that do not answer miss it."""
        if self.generation is None:
            return
        word = ForwardPointer(self.generation, _shown(self.address), line)
        listed = {*map(_shown, self._listed)} - {word.store}
        idle = [store for store in self.candidates if _shown(store.address) in listed]

        def tell(store: RedisStore) -> None:
            with suppress(StoreLost, ConfigError):
                store.take_whereabouts(word)

        if idle:
            with ThreadPoolExecutor(len(idle), "whereabouts") as pool:
                list(pool.map(tell, idle))

    def take_whereabouts(self, word: ForwardPointer) -> None:
        """Tell this store where the run goes on. Raises StoreLost, ConfigError."""
        sealed, junk = self.judge.seal_whereabouts(word), self.judge.junk(self.keys.elsewhere)
        self.run_script(scripts.TELL_WHEREABOUTS, sealed, _ELSEWHERE_LEASES * self._lease_ms, junk)

    def take_meeting(self, meeting: Meeting) -> Meeting:
        """Write down here that two lines of history met, unless somebody has. Returns what stands there.

        Raises StoreLost, ConfigError.
        """
        key, sealed = self.keys.meeting, self.judge.seal_meeting(meeting)
        px = _MEETING_LEASES * self._lease_ms
        if self.call(lambda: self._redis.set(key, sealed, nx=True, px=px)):
            return meeting
        if (standing := self.judge.meeting(key, self.call(lambda: self._redis.get(key)))) is not None:
            return standing
        self.call(lambda: self._redis.set(key, sealed, px=px))
        return meeting

    def find_run(self) -> None:
        """Go to the store that the run uses, if this one tells that it has several: one address of them is enough."""
        if not self.has_several:
            names = [self.keys.generation, self.keys.elsewhere]
            begun, elsewhere = self.call(lambda: self._redis.mget(names))
            if begun is None and elsewhere is None:
                return
        self.follow()

    def begin(self, generation: StoreTerm, legacy: HandoverState | None) -> bool:
        """Have a generation begin at this store. `legacy`: None: the run's first. False: another one has."""
        keys, judge = self.keys, self.judge
        records = ["", "", "", ""]
        if legacy is not None:
            committed = judge.seal_verdict(legacy.committed)
            judge.verdict(keys.committed, committed.encode())  # what is sealed from here on is of its session
            records = [judge.seal_opening(legacy.opening), committed, judge.seal_run(legacy.run)]
            records.append(judge.seal_orders(legacy.orders))
        args = [generation.store, judge.seal_generation(generation), judge.junk(keys.generation), *records]
        args += [RUN_TTL_S, HISTORY_LENGTH, self._lease_ms, *(() if legacy is None else legacy.members)]
        return bool(self.run_script(scripts.BEGIN_GENERATION, *args))

    def follow(self) -> None:
        """Go to the store that the run uses, if it is seen to use another one."""
        with self._following:
            self._enter_newest(self.survey())

    def may_found(self) -> bool:
        """Whether nobody can go on with the run in another store: so a node may begin it in this one.

        That is when it was asked again and again, for longer than a lease: all stores that are listed have answered,
        and no member told one of them that it is in another generation or without its store, nor began another one.
        """
        if not self.has_several:
            return True
        seen, now_s = self.survey(), time.monotonic()
        silent = self._silent(seen)
        if silent or not is_nowhere_else([candidate for _, candidate in seen], self.generation):
            self._is_quiet_since_s = None
            self._enter_newest(seen)
            self._say_waits(self._why_not_reached(silent))
            return False
        if self._is_quiet_since_s is None:
            self._is_quiet_since_s = now_s
        return now_s - self._is_quiet_since_s > self._lease_ms / 1000 + 2 * _SURVEY_S

    def _enter_newest(self, seen: Sequence[tuple[RedisStore, StoreProbe]]) -> None:
        newest = in_use([candidate for _, candidate in seen])
        if newest is None or newest.generation is None or newest.generation == self.generation:
            return
        told = [c.elsewhere.generation for _, c in seen if c.elsewhere is not None]
        if self.generation is None and max(told, default=newest.generation) > newest.generation:
            return  # the run goes on in one that does not answer here, and left this one behind
        if self.generation is None or newest.generation.number >= self.generation.number:
            self.enter(next(store for store, candidate in seen if candidate is newest), newest.generation)

    def enter(self, store: RedisStore, generation: StoreTerm) -> None:
        """Use this one of the candidates from now on."""
        if store.address != self.address:
            self._redis.connection_pool = connect(
                store.address, timeout_s=self._answer_s, key=self._key
            ).connection_pool
            self.address = store.address
        self.generation = generation
        self._answered_at_s = time.monotonic()
        self._is_proven = True
        self._era += 1

    @property
    def _stamp(self) -> str:
        """The generation as scripts compare it."""
        return _stamp_of(self.generation)

    def _find_way(self) -> None:
        if self.has_several and self.generation is None:
            self.follow()

    def _note_silence(self, silent_s: float) -> None:
        if self.has_several and silent_s > self._lease_ms / 1000:
            self.on_silence()

    # -- the run ------------------------------------------------------------------------------------------------

    def found_or_match(self, shared: Mapping[str, str]) -> dict[str, str]:
        record = record_of(shared)
        deadline_s, has_another_token = time.monotonic() + self._lease_ms / 1000, False
        while True:
            is_first = time.monotonic() < deadline_s
            if has_another_token and not is_first:  # nobody writes over what others wrote with a token of their own
                raise JoinRefused("run.token", "another", "this one")
            args = [self.judge.seal_run(record), RUN_TTL_S, self.judge.junk(self.keys.run), self._silence_ms]
            raw, other_protocol, is_alive = self.run_script(scripts.FOUND, *args, int(is_first))
            waits = is_first and bool(is_alive)
            if other_protocol and not waits:
                raise JoinRefused("protocol", text_of(other_protocol), record["protocol"])
            theirs = self.judge.run(self.keys.run, raw)
            if theirs is not None:
                require_equal(theirs, record)
                self._shared = record
                return record
            has_another_token = self._names_another_token(raw or self.judge.junk(self.keys.run))
            if has_another_token and not waits:
                raise JoinRefused("run.token", "another", "this one")
            if waits:
                time.sleep(min(PAUSE_MAX_S, self._lease_ms / 10_000))

    def _names_another_token(self, raw: bytes) -> bool:
        """Whether a record of the run was sealed with a token that this node does not have."""
        return id_of(raw) not in ("", self.judge.token_check)

    def require_token(self) -> None:
        """Raise ConfigError where the run's record was sealed with another token than this one's."""
        raw, _, _ = self.run_script(scripts.READ, at={"record": self.keys.run})
        if raw and self._names_another_token(raw) and self.judge.run(self.keys.run, raw) is None:
            raise ConfigError(
                "run.token: the nodes of this run have another one; give theirs, as run.token or ZERO_BAND_RUN__TOKEN"
            )

    def record(self) -> dict[str, str] | None:
        """Return what the run's nodes share, as its first one wrote it. None: there is no such run, or it is forged."""
        raw, _, _ = self.run_script(scripts.READ, at={"record": self.keys.run})
        return self.judge.run(self.keys.run, raw)

    def forget_dead_run(self) -> bool:
        return bool(self.run_script(scripts.CLEAR, self._lease_ms, self._silence_ms))

    def propose_restart_point(self, restart_point: RestartPoint, view: View) -> bool:
        judge, keys = self.judge, self.keys
        names = [keys.restart_point, keys.opening, keys.committed]
        before = [judge.seal_restart_point(view.restart_point), judge.seal_opening(view.opening)]
        before.append(judge.seal_verdict(view.committed))
        args = [*before, judge.seal_restart_point(restart_point), RUN_TTL_S, self._silence_ms, *map(judge.junk, names)]
        return bool(self.run_script(scripts.BEGIN, *args))

    def restore(self, known: StoreBackup) -> bool:
        keys, judge, member = self.keys, self.judge, known.member_id
        round = 0 if known.ready is None else known.ready.round
        ours = [
            *(judge.seal_opening(known.opening), judge.seal_verdict(known.committed)),
            *(judge.seal_run(known.run), judge.seal_orders(known.orders)),
            "" if known.ready is None else judge.seal_ready(member, known.ready),
            "" if known.vote is None else judge.seal_vote(member, *known.vote),
        ]
        places = [keys.opening, keys.committed, keys.run, keys.orders, f"{keys.ready(round)} {member}"]
        places.append(f"{keys.votes} {member}")
        args = [RUN_TTL_S, self._lease_ms, HISTORY_LENGTH, ROUND_TTL_S, member, *ours, *map(judge.junk, places)]
        args += [_stamp_of(known.generation), "" if known.vote is None else known.vote[0].id]
        return self.run_script(scripts.RESTORE, *args, at=self.keys.of_round(round)) == 1

    # -- leases -------------------------------------------------------------------------------------------------

    def renew_lease(
        self, member_id: str, peer: Peer, *, first: bool = False, listed_version: int = 0
    ) -> dict[str, Peer] | None:
        args: list[str | bytes | int] = [member_id, self._lease_ms, self._silence_ms, int(first)]
        args += [self.judge.seal_peer(member_id, peer), RUN_TTL_S]
        refuted, known = b"", self._known()
        for _ in range(_ASK_AGAIN):
            seen = [refuted, known.changes, known.alive_tag, known.peers.change]
            granted, against, *living = self.run_script(scripts.RENEW, *args, *seen)
            if granted:
                return self._living(known, *living)
            opening = self.judge.opening(self.keys.opening, against, None)
            is_newer = opening is not None and opening.version > listed_version
            if opening is not None and is_newer and member_id not in (*opening.members, *opening.late):
                return None
            refuted = against
        raise StoreLost(f"somebody changes {self.keys.opening} all the time; {member_id} could not renew its lease")

    def _living(self, known: StoreCache, times: Sequence[Any], alive: Any, peers: Sequence[Any]) -> dict[str, Peer]:
        """The living members, as a renewal tells what is new of them."""
        known.learn_times(*times)
        known.learn_alive(alive)
        if known.peers.learn(peers, known.change, lambda new: self.judge.peers(self.keys.peers, new)):
            self._find_stores_of(known.peers.read)
        known.view = None
        self._keep(known)
        return {member: peer for member, peer in known.peers.read.items() if member in known.alive}

    def _living_nodes(self) -> dict[str, str]:
        with self._seeing:
            view = self._seen.view
        if view is None:
            return {}
        return {peer.node_id: member for member, peer in view.peers.items() if member in view.alive}

    def release_lease(self, member_id: str) -> None:
        self._end(member_id, forget=True)

    def expire_lease(self, member_id: str) -> None:
        self._end(member_id, forget=False)

    def _end(self, member_id: str, *, forget: bool) -> None:
        self.run_script(scripts.END_LEASE, member_id, int(forget))

    def lease_ends_ms(self) -> dict[str, int]:
        leases = self.call(lambda: self._redis.zrangebyscore(self.keys.leases, "-inf", "+inf", withscores=True))
        return {text_of(member): int(end) for member, end in leases if abs(end) < float("inf")}

    def is_renewed(self, before_ms: int, end_ms: int) -> bool:
        return 0 < end_ms - before_ms < self._silence_ms

    def say_leaving(self, member_id: str) -> frozenset[str]:
        word = self.judge.seal_leaving(member_id)
        alive, leaving = self.run_script(scripts.LEAVE, member_id, self._silence_ms, ROUND_TTL_S, word)
        return frozenset(map(text_of, alive)) - self.judge.leaving(self.keys.leaving, pairs(leaving))

    # -- rounds -------------------------------------------------------------------------------------------------

    def view(self, round: int) -> View:
        return self._look(round)

    def await_change(
        self, round: int, seen: View | None, *, within_s: float, whole: bool = True, ends_with: Opening | None = None
    ) -> View:
        wait_ms = int(1000 * min(within_s, self._answer_s / 2))
        return self._look(round, whole=whole, seen=seen, wait_ms=wait_ms, ends_with=ends_with)

    def announce_ready(self, member_id: str, ready: Ready, *, enough: int | None = None) -> View:
        self._own = member_id
        said = _Said(self.judge.seal_ready(member_id, ready))
        return self._look(ready.round, said, whole=enough is None, enough_ready=_NEVER if enough is None else enough)

    def testify(self, opening: Opening, member_id: str, evidence: Evidence) -> None:
        key, word = self.keys.evidence(opening), self.judge.seal_evidence(member_id, opening, evidence)
        junk = self.judge.junk(f"{key} {member_id}")
        self.run_script(scripts.TESTIFY, member_id, word, SPENT_TTL_S, junk, at={"evidence": key})

    def evidence(self, opening: Opening) -> dict[str, Evidence]:
        key = self.keys.evidence(opening)
        return self.judge.evidence(key, opening, pairs(self.run_script(scripts.READ_SAID, at={"said": key})))

    def vote(self, opening: Opening, member_id: str, digest: str, *, generation: StoreTerm | None = None) -> View:
        self._own = member_id
        said = _Said(self.judge.seal_vote(member_id, opening, digest), opening)
        enough, stamp = len(opening.members), _stamp_of(generation)
        return self._look(opening.round, said, whole=False, enough_votes=enough, stamp=stamp)

    def _known(self) -> StoreCache:
        """What this node has seen of the store, if that is not too old; else nothing. To learn in."""
        with self._seeing:
            seen, now_s = self._seen, time.monotonic()
            leases = self._whole_leases * max(1.0, len(seen.alive) / _WHOLE_MEMBERS)
            if seen.era != self._era or now_s - seen.began_at_s > leases * self._lease_ms / 1000:
                seen = self._seen = StoreCache(era=self._era, began_at_s=now_s)
            return seen.fork()

    def _keep(self, known: StoreCache) -> None:
        """Have what was learned be known to the next look, unless another thread has learned more meanwhile."""
        with self._seeing:
            seen = self._seen
            is_newer = known.is_set_back or known.born != seen.born or known.change >= seen.change
            if known.era == seen.era and is_newer:
                self._seen = known

    def _look(
        self,
        round: int,
        said: _Said | None = None,
        *,
        whole: bool = True,
        enough_ready: int = _NEVER,
        enough_votes: int = _NEVER,
        seen: View | None = None,
        wait_ms: int = 0,
        stamp: str | None = None,
        ends_with: Opening | None = None,
    ) -> View:
        """Look once.

        `said`: what is written first, in the same round trip, if the store is in the generation of this `stamp`, or in
        that of the store in use. `wait_ms`: for news, where `seen` is the newest. `ends_with`: as in `await_change`.
        """
        keys, known, expected = self.keys, self._known(), self._expected
        known.ask_for_round(round)
        args: list[str | bytes | int] = [self._silence_ms, known.changes, *map(known.tag, RECORDS)]
        args += [known.alive_tag, known.ready.change, known.peers.change, known.opening_id, known.votes.change]
        args += [int(whole), enough_ready, enough_votes, self._own]
        puts_off = ends_with is not None and known.opening == ends_with and id_of(expected) != ends_with.id
        args += [int(known.ready.lacks(self._own)), int(known.votes.lacks(self._own))]
        args.append(_ANY if puts_off else tag_of(expected))
        if said is not None:
            args += [said.word, ROUND_TTL_S, self._stamp if stamp is None else stamp]
            args.append("" if said.opening is None else said.opening.id)
        waits = wait_ms > 0 and seen is not None and seen is known.view  # else another thread has seen more already
        wait = ("XREAD", "BLOCK", wait_ms, "COUNT", 1, "STREAMS", keys.news, f"{known.change}-0") if waits else ()
        told = self.run_script(scripts.VIEW, *args, wait=wait, at=self.keys.of_round(round))
        if puts_off and told[2] == _EXPECTED and (newest := self._known().view) is not None:
            return newest  # another thread may have seen more meanwhile
        try:
            told[1:3] = self._whole(known, told[1], told[2], expected)
        except ValueError:  # it was damaged; who knows nothing is told all of it
            known.records, known.view = {}, None
            self._keep(known)
            return self._look(
                round, said, whole=whole, enough_ready=enough_ready, enough_votes=enough_votes, stamp=stamp
            )
        view = self._learn(known, round, told)
        self._keep(known)
        return self._look(round, whole=whole) if known.peers.unseen else view  # some were forgotten

    def _whole(self, known: StoreCache, opening: Any, committed: Any, expected: bytes) -> tuple[Any, Any]:
        """The opening and the verdict, where they were told by what this node has. Raises ValueError."""
        if isinstance(opening, list):
            opening = patched(known.records.get("opening") or b"", opening[0])
            self.judge.require_sealed(opening, "opening")
        if isinstance(committed, list):
            committed = patched(known.records.get("committed") or b"", committed[0])
            self.judge.require_sealed(committed, "verdict")
        return opening, expected if committed == _EXPECTED else committed

    def _learn(self, known: StoreCache, round: int, told: Sequence[Any]) -> View:
        """Take over what a look told. Returns the view of it: the one from before where nothing is new."""
        keys, judge = self.keys, self.judge
        times, *records, alive, ready, peers, votes, is_settling, own_ready, own_vote = told
        known.learn_times(*times)
        if known.learn_records(records) or known.view is None:
            self._judge_records(known)
        opening, ready_key = known.opening, keys.ready(round)

        def read_ready(raw: Mapping[str, bytes]) -> dict[str, Ready]:
            return judge.ready(ready_key, round, raw)

        def read_votes(raw: Mapping[str, bytes]) -> dict[str, str]:
            return judge.votes(keys.votes, opening, raw)

        is_new = [
            known.learn_alive(alive),
            known.peers.learn(peers, known.change, lambda raw: judge.peers(keys.peers, raw)),
            known.ready.learn(ready, known.change, read_ready),
            known.votes.learn(votes, known.change, read_votes),
        ]
        if is_new[1]:
            self._find_stores_of(known.peers.read)
        if self._own:
            is_new.append(known.ready.learn_own(self._own, own_ready, read_ready))
            is_new.append(known.votes.learn_own(self._own, own_vote, read_votes))
        if known.view is not None and not any(is_new) and known.view.is_settling == bool(is_settling):
            return known.view
        view = View(
            opening=opening,
            committed=known.committed,
            alive=known.alive,
            ready=known.ready.read,
            votes=known.votes.read if opening is not None else {},
            failed=known.failed,
            peers=known.peers.read,
            is_known=known.is_known,
            is_settling=bool(is_settling),
            orders=known.orders,
            restart_point=known.restart_point,
            unseen_ready=known.ready.unseen,
            unseen_votes=known.votes.unseen if opening is not None else 0,
            generation=known.generation,
            refused={m: why for m in known.ready.rejected if (why := judge.malformed(f"{ready_key} {m}"))},
        )
        known.view = view.counted()
        return known.view

    def _judge_records(self, known: StoreCache) -> None:
        """Read the records of which there is one each; some count only beside others."""
        keys, judge, raw = self.keys, self.judge, known.records.get
        known.orders = judge.orders(keys.orders, raw("orders"))
        committed = judge.verdict(keys.committed, raw("committed"))
        opening = judge.opening(keys.opening, raw("opening"), committed)
        if opening != known.opening:
            known.forget_votes()
        known.committed, known.opening, known.view = committed, opening, None
        known.failed = judge.failure(keys.failed, opening, raw("failed"))
        known.is_known = judge.run(keys.run, raw("run")) is not None
        known.generation = judge.generation(keys.generation, raw("generation")) if self.generation else None
        known.restart_point = judge.restart_point(keys.restart_point, raw("restart_point"), committed)

    def tell_links(self, member_id: str, links: LinkRates) -> None:
        sealed = self.judge.seal_links(member_id, links)
        self.run_script(scripts.TELL_LINKS, member_id, sealed, RUN_TTL_S)

    def may_measure(self, member_id: str) -> bool:
        return bool(self.run_script(scripts.MEASURE, member_id, MEASURED_AT_ONCE, MEASURING_MS))

    def has_measured(self, member_id: str) -> None:
        self.call(lambda: self._redis.zrem(self.keys.measuring, member_id))

    def links(self) -> Mapping[str, LinkRates]:
        keys, known = self.keys, self._known()
        if known.links.change != known.links_change or known.links.unseen:
            times, links = self.run_script(scripts.READ_LINKS, known.changes, known.links.change)
            known.learn_times(*times)
            known.links.learn(links, known.links_change, lambda raw: self.judge.links(keys.links, raw))
            known.view = None  # it may be older than the changes that count as seen now
            self._keep(known)
        return known.links.read

    def signed(self, opening: Opening, member_id: str) -> Opening:
        return self.judge.signed(opening, member_id)

    def propose_opening(
        self, opening: Opening, *, current: Opening | None, generation: StoreTerm | None = None
    ) -> bool:
        judge, keys = self.judge, self.keys
        before, after = judge.seal_opening(current), judge.seal_opening(opening)
        args = [before, opening.round, after, RUN_TTL_S, opening.orders]
        args += [self._silence_ms, *map(judge.junk, (keys.opening, keys.committed, keys.orders))]
        args += [_stamp_of(generation), patch_of(before, after)]
        return bool(self.run_script(scripts.OPEN, *args))

    def report_failure(self, opening: Opening, reason: str) -> bool:
        judge, keys = self.judge, self.keys
        word = judge.seal_failure(opening, reason, by=self._own)
        args = [opening.version, word, ROUND_TTL_S, judge.junk(keys.committed), judge.junk(keys.failed)]
        return bool(self.run_script(scripts.FAIL, *args, opening.id))

    def expect_verdict(self, verdict: Verdict) -> None:
        self._expected = self.judge.seal_verdict(verdict).encode()

    def propose_verdict(self, verdict: Verdict, *, generation: StoreTerm | None = None) -> bool:
        opening, keys, judge = verdict.opening, self.keys, self.judge
        before, after = judge.seal_verdict(self._known().committed), judge.seal_verdict(verdict)
        args = [judge.seal_opening(opening), verdict.round, after, RUN_TTL_S, HISTORY_LENGTH, self._silence_ms]
        args += [SPENT_TTL_S, judge.junk(keys.committed), judge.junk(keys.failed), _stamp_of(generation)]
        shared = self._shared if verdict.session != self.session else None
        args += [patch_of(before, after), "" if shared is None else judge.seal_run(shared, verdict.sessions)]
        listed = (*opening.members, *opening.late)
        for _ in range(_ASK_AGAIN):
            outcome = self.run_script(
                scripts.COMMIT, *args, *self._done_orders(opening), *listed, at=self.keys.of_round(verdict.round)
            )
            if outcome != 2:
                return bool(outcome)
        return False

    def _done_orders(self, opening: Opening) -> tuple[bytes, str]:
        """The orders as they stand, and as they are once this round did what they say; nothing where it does not."""
        if opening.rollback is None:
            return b"", ""
        raw, orders, _ = self._look_at_orders()
        if orders.rollback != opening.rollback:
            return b"", ""
        return raw, self.judge.seal_orders(replace(orders, rollback=None, version=orders.version + 1))

    def _look_at_orders(self) -> tuple[bytes, Orders, int]:
        """The orders, as they stand there and as they count; the newest version that a round was opened under."""
        judge, keys = self.judge, self.keys
        raw, opening, committed = self.run_script(scripts.READ, at={"record": keys.orders})
        current = judge.opening(keys.opening, opening, judge.verdict(keys.committed, committed))
        return raw or b"", judge.orders(keys.orders, raw), 0 if current is None else current.orders

    def history(self) -> list[Verdict]:
        raw = self.run_script(scripts.READ_HISTORY)
        return self.judge.past_verdicts(self.keys.history, cast("list[bytes]", raw)[::-1])

    def give_orders(self, change: Callable[[Orders], Orders]) -> Orders:
        deadline_s = time.monotonic() + self._lease_ms / 1000
        while True:
            raw, orders, newest = self._look_at_orders()
            if orders.version < newest:  # the store lost some; those who know them bring them back
                if time.monotonic() < deadline_s:
                    time.sleep(PAUSE_MAX_S)
                    continue
                orders = replace(orders, version=newest)
            changed = change(orders)
            if changed == orders or self.run_script(scripts.ORDER, raw, self.judge.seal_orders(changed), RUN_TTL_S):
                return changed

    def close(self) -> None:
        super().close()
        for store in self._asked.values():
            store.close()


def _shown(address: str) -> str:
    return parse_store_url(address).shown


def _stamp_of(generation: StoreTerm | None) -> str:
    return "" if generation is None else f"{generation.number} {generation.store}"
