"""Which of a run's stores is in use, as one node knows it, and switching to another one.

Each of several stores has its own connection. The rules of `membership.succession` decide from their answers which one
is in use; `failover` has the steps of a member that lost its store.
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

from zeroband.config.store_url import (
    address_of_node,
    addresses_in,
    are_of_nodes,
    parse_store_url,
    place_of,
    with_login_of,
)
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
"""Deadline for a store's answer to a survey."""
_FRESH_MS = 3000
"""TTL of a member's report; members without a store repeat it several times a second."""
_SPLIT_BRAIN_LEASES = 12
"""TTL of a split-brain record; members of both lines look for one once per lease."""
_FORWARD_POINTER_LEASES = 4
"""TTL of a forward pointer, which members renew once per lease."""

_log = get_logger(__name__)


class StoreInUse(RedisRun):
    """The store that a run uses.

    `url`: one address, or several separated by blanks or held by nodes; the one in use is found at the first call.
    `lease_s`: length of a lease. The other arguments are those of `RedisRun`.
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
        """Generation of the store in use; None: the run has one store, or the one in use is not found yet."""
        self.on_silence: Callable[[], None] = self.follow
        """With several stores: finds another; called after each failed attempt once a lease passed unanswered."""
        self._era = 0
        """Grows with each session and each store, which invalidates caches."""
        self._following, self._finding = threading.RLock(), threading.Lock()
        self._found: tuple[str, ...] = ()
        """Addresses of stores that are not listed: of members, or from forward pointers."""
        self._candidates: dict[str, Self] = {}
        """Connections to single stores, by address without login."""
        self._connect_to = partial(type(self), run_id=run_id, key=key, lease_s=lease_s, retry_s=0.0, answer_s=_SURVEY_S)
        self._refusals: dict[str, str] = {}
        """Why stores refused the last survey, by address without login."""
        self._unused_since_s: float | None = None
        self._logged_wait = "", 0.0
        """The reason for waiting that was logged last, and when."""

    def reach(self, *, retry_s: float, least_stores: int = 1) -> None:
        """Run the self-test on the run's store, retried for `retry_s`. Raises StoreLost, ConfigError.

        Of several stores, find the one in use. If all that are listed are usable and none is in use, begin the first
        generation at the first one. `least_stores`: number of distinct stores that this needs.
        """
        if not self.has_several:
            self.require_usable(retry_s=retry_s)
            raw = self.call(lambda: self._redis.get(self.keys.forward_pointer))
            if (pointer := self.verifier.forward_pointer(self.keys.forward_pointer, raw)) is not None:
                raise ConfigError(
                    f"store.url names one of several stores of this run, which uses {pointer.store}: name all"
                )
            return
        until_s, self._logged_wait = time.monotonic() + retry_s, ("", time.monotonic())
        while self.generation is None:
            probes = self.survey()
            self._enter_newest(probes)
            if self.generation is not None:
                break
            if self._refusals and not self._are_of_nodes:  # if nodes hold the stores, another one may take over
                raise ConfigError(next(f"{shown}: {why}" for shown, why in self._refusals.items()))
            silent = self._silent(probes)
            found = [candidate for _, candidate in probes]
            sees_enough = bool(silent) or are_distinct(found, least_stores)
            if not silent and sees_enough and is_unused_elsewhere(found, None):
                first, candidate = probes[0]
                with suppress(StoreLost):  # the next survey shows that it is gone
                    self._require_all_usable(probes)
                    first.begin(StoreTerm(1, candidate.store), None)
                self._unused_since_s = time.monotonic()
                continue
            reason = self._wait_reason(silent, sees_enough=sees_enough)
            if time.monotonic() > until_s:
                raise StoreLost(reason)
            self._log_wait(reason)
            time.sleep(PAUSE_MAX_S)
        self._require_all_usable(self.survey())

    def _require_all_usable(self, probes: Sequence[tuple[Self, StoreProbe]]) -> None:
        """Run the self-test on each of these stores, and log the spare ones that fail it.

        Raises StoreLost and ConfigError for the store in use, or for any while none is.
        """
        for store, _ in probes:
            shown = _shown(store.address)
            is_needed = self.generation is None or shown == _shown(self.address)
            try:
                store.require_usable(retry_s=_SURVEY_S)
            except ConfigError as error:
                if is_needed:
                    raise ConfigError(f"{shown}: {error}") from error
                fields = {"store": shown, "why": str(error)}
                _log.warning("a spare store is unusable; the run goes on without it", extra={"fields": fields})
            except StoreLost:
                if is_needed:
                    raise

    def _log_wait(self, reason: str) -> None:
        """Log why the run cannot start; a new reason only if it lasts."""
        logged, since_s = self._logged_wait
        if reason != logged and time.monotonic() - since_s > REMIND_S:
            self._logged_wait = reason, time.monotonic()
            _log.warning("cannot start the run yet", extra={"fields": {"why": reason}})

    def _wait_reason(self, silent: Sequence[str], *, sees_enough: bool = True) -> str:
        if not sees_enough:
            return (
                "this node sees no store of another machine: it may be the run's first node, or cut off from the "
                "others; start another node, or this one with --bootstrap if no other is alive"
            )
        if not silent:
            return "the stores of the run point to another store, which does not answer yet"
        key = "store.peers" if self._are_of_nodes else "store.url"
        why = self._refusals
        named = ", ".join(f"{shown} ({why[shown]})" if shown in why else shown for shown in silent)
        return (
            f"no store of {key} holds this run, and {len(silent)} of {len(self._listed)} do not answer, but may hold "
            f"it: {named}; start them, or remove those that are gone from {key}"
        )

    @property
    def has_several(self) -> bool:
        """Whether the run has several stores, as far as this node knows."""
        return self._are_of_nodes or len(self._listed) > 1 or self.generation is not None

    @property
    def candidates(self) -> tuple[Self, ...]:
        """Connections to the stores that the run may use: those listed, then those found."""
        with self._finding:
            addresses = (*self._listed, *self._found, self.address)
            for address in addresses:
                if (shown := _shown(address)) not in self._candidates:
                    self._candidates[shown] = self._connect_to(address)
            return tuple(self._candidates[shown] for shown in dict.fromkeys(map(_shown, addresses)))

    def survey(self, member_id: str = "", member_report: MemberReport | None = None) -> list[tuple[Self, StoreProbe]]:
        """Probe all stores of the run in parallel, and those that forward pointers name. Returns the answers in order.

        `member_report`: is published in each store.
        """
        answers = dict[Self, StoreProbe | None]()
        refusals = dict[str, str]()

        def probe(store: Self) -> StoreProbe | None:
            try:
                return store.probe(member_id, member_report)
            except ConfigError as error:
                refusals[_shown(store.address)] = str(error)
            except StoreLost:
                pass
            return None

        while pending := [store for store in self.candidates if store not in answers]:
            with ThreadPoolExecutor(len(pending), "survey") as pool:
                answers.update(zip(pending, pool.map(probe, pending), strict=True))
            for store, answer in answers.items():
                if answer is not None and answer.forward_pointer is not None:
                    self._add(with_login_of(store.address, answer.forward_pointer.store))
        self._refusals = refusals
        return [(store, answer) for store in self.candidates if (answer := answers.get(store)) is not None]

    def _add(self, *addresses: str) -> None:
        """Survey these stores too; the oldest of those found before make room."""
        with self._finding:
            self._found = tuple(dict.fromkeys([*addresses, *self._found]))[:MAX_STORES]

    def _add_stores_of(self, peers: Mapping[str, Peer]) -> None:
        if self._are_of_nodes:
            self._add(*(address_of_node(place_of(host, port)) for host, port in store_addresses(peers)))

    def _silent(self, probes: Sequence[tuple[Self, StoreProbe]]) -> list[str]:
        """The listed stores that did not answer."""
        answering = [_shown(store.address) for store, _ in probes]
        return [shown for shown in map(_shown, self._listed) if shown not in answering]

    def probe(self, member_id: str, member_report: MemberReport | None) -> StoreProbe:
        """Read this store's state as a candidate. Raises StoreLost, ConfigError."""
        keys, verifier = self.keys, self.verifier
        sealed = "" if member_report is None else verifier.seal_member_report(member_id, member_report)
        answer = self.run_script(scripts.PROBE_STORE, uuid.uuid4().hex, member_id, sealed, RUN_TTL_S, _FRESH_MS)
        id, generation, reports, committed, pointer, split_brain = answer
        verdict = verifier.verdict(keys.committed, committed)
        return StoreProbe(
            text_of(id),
            verifier.generation(keys.generation, generation),
            -1 if verdict is None else verdict.round,
            verifier.member_reports(keys.member_reports, pairs(reports)),
            verifier.forward_pointer(keys.forward_pointer, pointer),
            Line.of(verdict),
            verifier.split_brain(keys.split_brain, split_brain),
        )

    def publish_forward_pointer(self, line: Line | None = None) -> None:
        """Tell the listed stores that are not in use where the run continues; ignores those that do not answer."""
        if self.generation is None:
            return
        pointer = ForwardPointer(self.generation, _shown(self.address), line)
        listed = {*map(_shown, self._listed)} - {pointer.store}
        unused = [store for store in self.candidates if _shown(store.address) in listed]

        def publish(store: Self) -> None:
            with suppress(StoreLost, ConfigError):
                store.set_forward_pointer(pointer)

        if unused:
            with ThreadPoolExecutor(len(unused), "forward_pointer") as pool:
                list(pool.map(publish, unused))

    def set_forward_pointer(self, pointer: ForwardPointer) -> None:
        """Tell this store where the run continues. Raises StoreLost, ConfigError."""
        sealed, rejected = (
            self.verifier.seal_forward_pointer(pointer),
            self.verifier.rejected(self.keys.forward_pointer),
        )
        self.run_script(scripts.SET_FORWARD_POINTER, sealed, _FORWARD_POINTER_LEASES * self._lease_ms, rejected)

    def record_split_brain(self, split_brain: SplitBrain) -> SplitBrain:
        """Write a split-brain record unless there is one. Returns the stored one. Raises StoreLost, ConfigError."""
        key, sealed = self.keys.split_brain, self.verifier.seal_split_brain(split_brain)
        px = _SPLIT_BRAIN_LEASES * self._lease_ms
        if self.call(lambda: self._redis.set(key, sealed, nx=True, px=px)):
            return split_brain
        if (stored := self.verifier.split_brain(key, self.call(lambda: self._redis.get(key)))) is not None:
            return stored
        self.call(lambda: self._redis.set(key, sealed, px=px))  # what is stored is invalid
        return split_brain

    def find_run(self) -> None:
        """Switch to the store in use if this one knows of several: one of their addresses is enough."""
        if not self.has_several:
            names = [self.keys.generation, self.keys.forward_pointer]
            if self.call(lambda: self._redis.mget(names)) == [None, None]:
                return
        self.follow()

    def begin(self, generation: StoreTerm, handover: HandoverState | None) -> bool:
        """Begin a generation at this store. `handover`: None: the run's first. False: another one has begun."""
        keys, verifier = self.keys, self.verifier
        records = ["", "", "", ""]
        if handover is not None:
            committed = verifier.seal_verdict(handover.committed)
            verifier.verdict(keys.committed, committed.encode())  # the records below are sealed for its session
            records = [verifier.seal_plan(handover.plan), committed, verifier.seal_run(handover.run)]
            records.append(verifier.seal_orders(handover.orders))
        args = [generation.store, verifier.seal_generation(generation), verifier.rejected(keys.generation), *records]
        args += [RUN_TTL_S, HISTORY_LENGTH, self._lease_ms, *(() if handover is None else handover.members)]
        return bool(self.run_script(scripts.BEGIN_GENERATION, *args))

    def follow(self) -> None:
        """Switch to the store in use, if a survey shows another one."""
        with self._following:
            self._enter_newest(self.survey())

    def may_found(self) -> bool:
        """Whether a node may found the run in this store, since no member can be continuing it in another one.

        True after repeated surveys over more than a lease have shown that all listed stores answer, that no member
        reported another generation or a lost store to one of them, and that none began a generation.
        """
        if not self.has_several:
            return True
        probes, now_s = self.survey(), time.monotonic()
        silent = self._silent(probes)
        if silent or not is_unused_elsewhere([candidate for _, candidate in probes], self.generation):
            self._unused_since_s = None
            self._enter_newest(probes)
            self._log_wait(self._wait_reason(silent))
            return False
        if self._unused_since_s is None:
            self._unused_since_s = now_s
        return now_s - self._unused_since_s > self._lease_ms / 1000 + 2 * _SURVEY_S

    def _enter_newest(self, probes: Sequence[tuple[Self, StoreProbe]]) -> None:
        newest = active_store([candidate for _, candidate in probes])
        if newest is None or newest.generation is None or newest.generation == self.generation:
            return
        pointers = [c.forward_pointer.generation for _, c in probes if c.forward_pointer is not None]
        if self.generation is None and max(pointers, default=newest.generation) > newest.generation:
            return  # the run continues in a newer generation, whose store does not answer
        if self.generation is None or newest.generation.number >= self.generation.number:
            self.enter(next(store for store, candidate in probes if candidate is newest), newest.generation)

    def enter(self, store: Self, generation: StoreTerm) -> None:
        """Use this candidate from now on."""
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
        return stamp_of(self.generation)

    def _find_server(self) -> None:
        if self.has_several and self.generation is None:
            self.follow()

    def _note_silence(self, silent_s: float) -> None:
        if self.has_several and silent_s > self._lease_ms / 1000:
            self.on_silence()

    def close(self) -> None:
        super().close()
        for store in self._candidates.values():
            store.close()


def _shown(address: str) -> str:
    return parse_store_url(address).shown


def stamp_of(generation: StoreTerm | None) -> str:
    """A generation as the scripts compare it; empty for None."""
    return "" if generation is None else f"{generation.number} {generation.store}"
