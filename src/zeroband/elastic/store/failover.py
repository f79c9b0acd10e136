"""Failover of a member between the stores of its run: surveys them and takes the steps that the rules prescribe.

It also detects a split brain: a second line of history, founded by a machine that was cut off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from zeroband.config.store_url import parse_store_url
from zeroband.elastic.membership.succession import (
    Begin,
    Enter,
    KeepWaiting,
    Line,
    Pledge,
    Rejoin,
    SplitBrain,
    StoreProbe,
    active_store,
    detect_split_brain,
    goes_on_elsewhere,
    next_step,
)
from zeroband.elastic.store.backup import LiveBackup
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, Fenced, LineEnds, StoreLost
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.log import get_logger

_PAUSE_S = 0.2
_CHECK_INTERVAL_S = 2.0
"""Time between two surveys while too few members are at the store in use."""
_REMIND_S = 30.0
_SURVEYING_S = 3.0
"""Time for surveys before the silent store is called again, which may take a lease."""
_REPORTS_S = 2.0
"""Time in which all members that lost a store report it: each store answers within a second."""
_CLOSE_S = 5.0

_log = get_logger(__name__)


class StoreFailover:
    """Keeps a member at the store that its run uses, and publishes forward pointers in the others.

    One per membership. Owns a thread, which publishes and looks at the other stores every `survey_s`: the others give a
    member that stays behind a lease to follow, and it may be in the midst of its inner steps.
    """

    def __init__(
        self,
        store: RedisStore,
        member_id: str,
        memory: LiveBackup,
        flags: SharedFlags,
        on_event: Callable[..., object],
        *,
        survey_s: float,
    ) -> None:
        self._store, self._member_id, self._memory, self._flags = store, member_id, memory, flags
        self._on_event = on_event
        self._lock = threading.RLock()
        self._checked_at_s = time.monotonic()
        self._lost_since_s: float | None = None
        """Since when this member has no store; None: it has one."""
        self._logged_wait = "", 0.0
        """The reason for waiting that was logged last, and when."""
        self._watch = SplitBrainWatch(store)
        self._split_brain: SplitBrain | None = None
        assert store.generation is not None, "the store in use is found before there is a member"
        memory.enter(store.generation, None)
        flags.set_generation(store.generation.number)
        store.on_silence = self.recover
        self._report_in_use(store.generation.number)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch_stores, args=(survey_s,), name="store-watch", daemon=True)
        self._watcher.start()

    def _watch_stores(self, every_s: float) -> None:
        """Watch the other stores until closed. A node that starts at an unused one finds the run by the pointers."""
        while True:
            try:
                self._look_around()
            except Exception as error:  # noqa: BLE001 - nodes that start later depend on this thread
                _log.warning("cannot publish where the run continues", extra={"fields": {"error": repr(error)}})
            if self._closing.wait(every_s):
                return

    def _look_around(self) -> None:
        """Publish the forward pointer, follow the others if they have switched, and note a split brain."""
        own, generation = Line.of(self._memory.known.committed), self._memory.generation
        self._store.publish_forward_pointer(own)
        if own is None or generation is None or self._flags.is_fenced:
            return
        probes, until_s = self._store.survey(), time.monotonic() + _SURVEYING_S
        while goes_on_elsewhere([candidate for _, candidate in probes], generation, own):
            if self._take_step(has_store=True) or time.monotonic() > until_s or self._closing.wait(_PAUSE_S):
                break
            probes = self._store.survey()
        split_brain = self._watch.check(own, probes)
        if split_brain is not None and split_brain != self._split_brain:
            self._split_brain = split_brain
            self._on_event("split_brain", goes_on=asdict(split_brain.winner), ends=asdict(split_brain.loser))

    def require_line(self) -> None:
        """Raise LineEnds if this member's line of history lost against another one."""
        met, committed = self._split_brain, self._memory.known.committed
        if met is not None and committed is not None and committed.session == met.loser.session:
            raise LineEnds(
                f"two lines of this run have met (split brain): {_shown(met.winner)} goes on; {_shown(met.loser)}, "
                "that of this node, ends here, and its checkpoints stay. To join the other one, start this node again "
                "with --run.start-over and another ckpt.path"
            )

    def recover(self) -> None:
        """Take steps towards another store, since the one in use is silent or lost its record. Raises Fenced."""
        until_s, has_store = time.monotonic() + _SURVEYING_S, False
        while not has_store and time.monotonic() < until_s:
            has_store = self._take_step(has_store=False)
            time.sleep(_PAUSE_S)

    def check_other_stores(self) -> None:
        """Check now and then whether the others have switched to another store, since too few are at this one."""
        if time.monotonic() - self._checked_at_s > _CHECK_INTERVAL_S:
            self._checked_at_s = time.monotonic()
            self._take_step(has_store=True)

    def _take_step(self, *, has_store: bool) -> bool:
        """Survey the stores and take the next step. Returns whether this entered a store."""
        with self._lock:
            if self._flags.is_fenced:
                raise Fenced(f"{self._member_id} may not vote any more: the run went on without it")
            before, now_s = self._memory.generation, time.monotonic()
            if not has_store and self._lost_since_s is None:
                self._lost_since_s = now_s
            member_report = self._memory.member_report()
            probes = self._store.survey(self._member_id, member_report)
            stores = {candidate.store: store for store, candidate in probes}
            step = next_step(
                *([candidate for _, candidate in probes], member_report),
                has_store=has_store,
                has_waited=self._lost_since_s is None or now_s - self._lost_since_s > _REPORTS_S,
            )
            match step:
                case Enter(candidate, generation):
                    self._lost_since_s = None
                    self._store.enter(stores[candidate.store], generation)
                    view = self._store.view(0)
                    self._memory.enter(generation, view.plan)
                    self._memory.learn(view)  # a member reports a generation only after it has read its first verdict
                    self._flags.set_generation(generation.number)
                    if generation != before:
                        self._report_in_use(generation.number)
                case Pledge(generation):
                    self._memory.promise(generation)
                    self._flags.set_generation(generation.number)
                case Begin(candidate, generation, handover):
                    stores[candidate.store].begin(generation, handover)
                case Rejoin(candidate, generation):
                    self._store.enter(stores[candidate.store], generation)
                    self._flags.set_fenced(True)  # the generation began without this member's votes
                case KeepWaiting(reason):
                    self._log_wait(reason)
            return isinstance(step, Enter | Rejoin)

    def _report_in_use(self, number: int) -> None:
        self._on_event("store_in_use", store=parse_store_url(self._store.address).shown, generation=number)

    def _log_wait(self, reason: str) -> None:
        now_s, (logged, logged_at_s) = time.monotonic(), self._logged_wait
        if reason != logged or now_s - logged_at_s > _REMIND_S:
            self._logged_wait = reason, now_s
            _log.warning("waiting for a store", extra={"fields": {"why": reason}})

    def close(self) -> None:
        """Stop. The store connection then follows the run without a member, for the node's next one."""
        self._closing.set()
        self._watcher.join(_CLOSE_S)
        self._store.on_silence = self._store.follow


class SplitBrainWatch:
    """Detects a second line of the run in the stores that a member knows.

    Members of the line whose session sorts first record a split brain once in their store; the others read it there, or
    in a store to which those could copy it.
    """

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._lease_ends_ms: dict[str, dict[str, int]] = {}
        """Ends of the leases in other stores at the previous check."""

    def check(self, own: Line, probes: Sequence[tuple[RedisStore, StoreProbe]]) -> SplitBrain | None:
        """Return the split brain that concerns this member. `own`: its line. `probes`: of all stores, as they are."""
        recorded = (c.split_brain for _, c in probes if c.split_brain is not None)
        found = next((split_brain for split_brain in recorded if split_brain.involves(own)), None)
        if found is None:
            detected = detect_split_brain(own, [line for store, c in probes for line in self._living_lines(store, c)])
            if detected is None:
                return None
            # Of the candidates: their connections work in whatever session their store is.
            in_use_here = next((store for store, _ in probes if store.address == self._store.address), self._store)
            found = in_use_here.record_split_brain(detected)
        for store, candidate in probes:
            if candidate.line is not None and found.involves(candidate.line) and candidate.split_brain is None:
                with suppress(StoreLost, ConfigError):
                    store.record_split_brain(found)
        return found

    def _living_lines(self, store: RedisStore, candidate: StoreProbe) -> list[Line]:
        """The lines in a store whose members are alive: they published a pointer to it, or renew leases there."""
        lines = [candidate.forward_pointer.line] if candidate.forward_pointer is not None else []
        if store.address != self._store.address and active_store([candidate]) is not None:
            with suppress(StoreLost, ConfigError):
                shown, ends_ms = parse_store_url(store.address).shown, store.lease_ends_ms()
                if self._lease_ends_ms.get(shown, ends_ms) != ends_ms:
                    lines.append(candidate.line)
                self._lease_ends_ms[shown] = ends_ms
        return [line for line in lines if line is not None]


def _shown(line: Line) -> str:
    return f"session {line.session} (round {line.round}, {line.tokens} tokens, {', '.join(line.members)})"
