"""Which store a run uses, of one or several, as one node knows it; and how it goes to another one.

Each of several stores is asked through a separate connection. From what they tell the rules of
`membership.succession` say which one is in use; what a member does when that is lost, `failover` says.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Self

from zeroband.config.store_url import address_of_node, addresses_in, are_of_nodes, beside, parse_store_url, place_of
from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.records import Peer, StoreTerm
from zeroband.elastic.membership.succession import (
    MAX_STORES,
    ForwardPointer,
    HandoverState,
    Line,
    MemberReport,
    SplitBrain,
    StoreProbe,
    active_store,
    are_distinct,
    is_unused_elsewhere,
    store_addresses,
)
from zeroband.elastic.store import scripts
from zeroband.elastic.store.connection import connect
from zeroband.elastic.store.keys import HISTORY_LENGTH, RUN_TTL_S
from zeroband.elastic.store.redis_run import PAUSE_MAX_S, REMIND_S, RedisRun
from zeroband.elastic.store.store_cache import pairs, text_of
from zeroband.errors import ConfigError, StoreLost
from zeroband.observe.log import get_logger

_SURVEY_S = 1.0
"""In which a store that the run may go to must answer."""
_FRESH_MS = 3000
"""So long counts what a member told a store that the run may go to; it tells it again every moment."""
_MEETING_LEASES = 12
"""So long stands what was written down of two lines that met: all members of both look once a lease."""
_ELSEWHERE_LEASES = 4
"""So long counts what a store was told that the run does not use; it is told once a lease."""

_log = get_logger(__name__)


class StoreInUse(RedisRun):
    """The store that a run uses.

    `url`: of several, with blanks between them or held by nodes, the one in use is found at the first call (`reach`).
    `lease_s`: life of a lease. The others are those of `RedisRun`.
    """

    def __init__(
        self,
        url: str,
        run_id: str,
        *,
        key: RunKey | None,
        lease_s: float,
        retry_s: float,
        answer_s: float,
        before_retry: Callable[[], None] = lambda: None,
    ) -> None:
        listed = addresses_in(url) or (url,)
        super().__init__(listed[0], run_id, key=key, retry_s=retry_s, answer_s=answer_s, before_retry=before_retry)
        self._lease_ms = int(lease_s * 1000)
        self._key, self._listed, self._are_of_nodes = key, listed, are_of_nodes(url)
        self.generation: StoreTerm | None = None
        """The one that the store in use is in, of several; None: it is the only one, or not found yet."""
        self.on_silence: Callable[[], None] = self.follow
        """Called while the store in use, of several, has been silent for a lease: finds another one, if it can."""
        self._era = 0
        """Grows with each session and each store: what was seen in one is not learned from in another."""
        self._following, self._finding = threading.RLock(), threading.Lock()
        self._others: tuple[str, ...] = ()
        """Addresses of stores that are not listed, and that members hold or told of."""
        self._asked: dict[str, Self] = {}
        """Those that were asked by themselves, by what is shown of their addresses."""
        self._ask = partial(type(self), run_id=run_id, key=key, lease_s=lease_s, retry_s=0.0, answer_s=_SURVEY_S)
        self._refusals: dict[str, str] = {}
        """Why stores that answered the last survey cannot serve a run, by what is shown of their addresses."""
        self._is_quiet_since_s: float | None = None
        self._said = "", 0.0
        """Why it waits to begin a run, and when that was said."""

    def reach(self, *, retry_s: float, least_stores: int = 1) -> None:
        """Have Redis do once what a run asks of it, retried for `retry_s`. Raises StoreLost, ConfigError.

        Of several stores, the one in use is found, or the first one is taken into use where all that are listed can
        serve a run and none is. `least_stores`: different ones that must be there for that.
        """
        if not self.has_several:
            self.require_usable(retry_s=retry_s)
            raw = self.call(lambda: self._redis.get(self.keys.elsewhere))
            if (told := self.verifier.forward_pointer(self.keys.elsewhere, raw)) is not None:
                raise ConfigError(
                    f"store.url names one of several stores of this run, which uses {told.store}: name all"
                )
            return
        until_s, self._said = time.monotonic() + retry_s, ("", time.monotonic())
        while self.generation is None:
            seen = self.survey()
            self._enter_newest(seen)
            if self.generation is not None:
                break
            if self._refusals and not self._are_of_nodes:  # a store of another node's may be replaced
                raise ConfigError(next(f"{shown}: {why}" for shown, why in self._refusals.items()))
            silent = self._silent(seen)
            found = [candidate for _, candidate in seen]
            sees_enough = bool(silent) or are_distinct(found, least_stores)
            if not silent and sees_enough and is_unused_elsewhere(found, None):
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

    def _require_all_usable(self, seen: Sequence[tuple[Self, StoreProbe]]) -> None:
        """Have each of these stores do once what a run asks of it. Says which of those that are not in use refuse.

        Raises StoreLost, and ConfigError where the one in use refuses, or any while none is.
        """
        for store, _ in seen:
            shown = _shown(store.address)
            try:
                store.require_usable(retry_s=_SURVEY_S)
            except ConfigError as error:
                if self.generation is None or shown == _shown(self.address):
                    raise ConfigError(f"{shown}: {error}") from error
                fields = {"store": shown, "why": str(error)}
                _log.warning("a spare store is unusable; the run goes on without it", extra={"fields": fields})
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
                "others, who go on; start another node of the run, or this one with --bootstrap if no other one lives"
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

    @property
    def has_several(self) -> bool:
        """Whether the run has several stores, as far as this node knows."""
        return self._are_of_nodes or len(self._listed) > 1 or self.generation is not None

    @property
    def candidates(self) -> tuple[Self, ...]:
        """The stores that the run may use: those listed, then those found. Each is asked by itself."""
        with self._finding:
            addresses = (*self._listed, *self._others, self.address)
            for shown, address in zip(map(_shown, addresses), addresses, strict=True):
                if shown not in self._asked:
                    self._asked[shown] = self._ask(address)
            return tuple(self._asked[shown] for shown in dict.fromkeys(map(_shown, addresses)))

    def survey(self, member_id: str = "", member_report: MemberReport | None = None) -> list[tuple[Self, StoreProbe]]:
        """Ask all stores of the run at once; those that answer, in their order.

        Those of which one of them tells are asked, too. `member_report`: is told to each of them.
        """
        answers = dict[Self, StoreProbe | None]()

        refusals = dict[str, str]()

        def ask(store: Self) -> StoreProbe | None:
            try:
                return store.look_at_candidate(member_id, member_report)
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
        with self._finding:
            self._others = tuple(dict.fromkeys([*addresses, *self._others]))[:MAX_STORES]

    def _find_stores_of(self, peers: Mapping[str, Peer]) -> None:
        if self._are_of_nodes:
            places = [place_of(host, port) for host, port in store_addresses(peers)]
            self._find(*map(address_of_node, places))

    def _silent(self, seen: Sequence[tuple[Self, StoreProbe]]) -> list[str]:
        """The stores that are listed and do not answer."""
        answering = [_shown(store.address) for store, _ in seen]
        return [shown for shown in map(_shown, self._listed) if shown not in answering]

    def look_at_candidate(self, member_id: str, member_report: MemberReport | None) -> StoreProbe:
        """Look at this store as one that the run may go to. Raises StoreLost, ConfigError."""
        keys, verifier = self.keys, self.verifier
        word = "" if member_report is None else verifier.seal_member_report(member_id, member_report)
        told = self.run_script(scripts.TELL_MEMBER_REPORT, uuid.uuid4().hex, member_id, word, RUN_TTL_S, _FRESH_MS)
        id, generation, said, committed, elsewhere, met = told
        verdict = verifier.verdict(keys.committed, committed)
        member_reports = verifier.member_reports(keys.member_reports, pairs(said))
        round = -1 if verdict is None else verdict.round
        return StoreProbe(
            *(text_of(id), verifier.generation(keys.generation, generation), round, member_reports),
            verifier.forward_pointer(keys.elsewhere, elsewhere),
            line=Line.of(verdict),
            meeting=verifier.meeting(keys.meeting, met),
        )

    def tell_forward_pointer(self, line: Line | None = None) -> None:
        """Tell the stores that are listed, and not in use, where the run goes on. Those that do not answer miss it."""
        if self.generation is None:
            return
        word = ForwardPointer(self.generation, _shown(self.address), line)
        listed = {*map(_shown, self._listed)} - {word.store}
        idle = [store for store in self.candidates if _shown(store.address) in listed]

        def tell(store: Self) -> None:
            with suppress(StoreLost, ConfigError):
                store.take_forward_pointer(word)

        if idle:
            with ThreadPoolExecutor(len(idle), "forward_pointer") as pool:
                list(pool.map(tell, idle))

    def take_forward_pointer(self, word: ForwardPointer) -> None:
        """Tell this store where the run goes on. Raises StoreLost, ConfigError."""
        sealed, rejected = self.verifier.seal_forward_pointer(word), self.verifier.rejected(self.keys.elsewhere)
        self.run_script(scripts.TELL_FORWARD_POINTER, sealed, _ELSEWHERE_LEASES * self._lease_ms, rejected)

    def take_meeting(self, meeting: SplitBrain) -> SplitBrain:
        """Write down here that two lines of history met, unless somebody has. Returns what stands there.

        Raises StoreLost, ConfigError.
        """
        key, sealed = self.keys.meeting, self.verifier.seal_meeting(meeting)
        px = _MEETING_LEASES * self._lease_ms
        if self.call(lambda: self._redis.set(key, sealed, nx=True, px=px)):
            return meeting
        if (standing := self.verifier.meeting(key, self.call(lambda: self._redis.get(key)))) is not None:
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

    def begin(self, generation: StoreTerm, state: HandoverState | None) -> bool:
        """Have a generation begin at this store. `state`: None: the run's first. False: another one has."""
        keys, verifier = self.keys, self.verifier
        records = ["", "", "", ""]
        if state is not None:
            committed = verifier.seal_verdict(state.committed)
            verifier.verdict(keys.committed, committed.encode())  # what is sealed from here on is of its session
            records = [verifier.seal_plan(state.plan), committed, verifier.seal_run(state.run)]
            records.append(verifier.seal_orders(state.orders))
        args = [generation.store, verifier.seal_generation(generation), verifier.rejected(keys.generation), *records]
        args += [RUN_TTL_S, HISTORY_LENGTH, self._lease_ms, *(() if state is None else state.members)]
        return bool(self.run_script(scripts.BEGIN_GENERATION, *args))

    def follow(self) -> None:
        """Switch to the store that the run uses, if a survey shows another one."""
        with self._following:
            self._enter_newest(self.survey())

    def may_found(self) -> bool:
        """Whether a node may begin the run in this store: no member can be continuing it in another one.

        True once repeated surveys over more than a lease have shown that all listed stores answer, that no member
        reported to one of them from another generation or without a store, and that none began a generation.
        """
        if not self.has_several:
            return True
        seen, now_s = self.survey(), time.monotonic()
        silent = self._silent(seen)
        if silent or not is_unused_elsewhere([candidate for _, candidate in seen], self.generation):
            self._is_quiet_since_s = None
            self._enter_newest(seen)
            self._say_waits(self._why_not_reached(silent))
            return False
        if self._is_quiet_since_s is None:
            self._is_quiet_since_s = now_s
        return now_s - self._is_quiet_since_s > self._lease_ms / 1000 + 2 * _SURVEY_S

    def _enter_newest(self, seen: Sequence[tuple[Self, StoreProbe]]) -> None:
        newest = active_store([candidate for _, candidate in seen])
        if newest is None or newest.generation is None or newest.generation == self.generation:
            return
        told = [c.elsewhere.generation for _, c in seen if c.elsewhere is not None]
        if self.generation is None and max(told, default=newest.generation) > newest.generation:
            return  # the run goes on in one that does not answer here, and left this one behind
        if self.generation is None or newest.generation.number >= self.generation.number:
            self.enter(next(store for store, candidate in seen if candidate is newest), newest.generation)

    def enter(self, store: Self, generation: StoreTerm) -> None:
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
        return stamp_of(self.generation)

    def _find_way(self) -> None:
        if self.has_several and self.generation is None:
            self.follow()

    def _note_silence(self, silent_s: float) -> None:
        if self.has_several and silent_s > self._lease_ms / 1000:
            self.on_silence()

    def close(self) -> None:
        super().close()
        for store in self._asked.values():
            store.close()


def _shown(address: str) -> str:
    return parse_store_url(address).shown


def stamp_of(generation: StoreTerm | None) -> str:
    """A generation as scripts compare it; empty where there is none."""
    return "" if generation is None else f"{generation.number} {generation.store}"
