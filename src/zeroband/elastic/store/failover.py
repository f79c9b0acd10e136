"""A member of a run of several stores goes to another one: it asks all of them, and does what the rules say.

It also notices where the run has a second line of history, which a machine founded that was cut off.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from zeroband.config.store_url import parse_store_url
from zeroband.elastic.membership.records import Verdict
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
    next_step,
)
from zeroband.elastic.store.backup import LiveBackup
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, Fenced, LineEnds, StoreLost
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.log import get_logger

_PAUSE_S = 0.2
_AGAIN_S = 2.0
"""Between two looks at the other stores while too few members are at this one."""
_REMIND_S = 30.0
_ASKING_S = 3.0
"""For so long other stores are asked before the silent one is called again, which may take a lease."""
_ALL_TOLD_S = 2.0
"""Within which all members that lost a store tell the others, each of which answers within a second."""
_CLOSE_S = 5.0

_log = get_logger(__name__)


class StoreFailover:
    """Keeps a member at the store that its run uses, and tells the others which one that is. One for each membership.

    Owns the thread that tells them, once every `tell_s`.
    """

    def __init__(
        self,
        store: RedisStore,
        member_id: str,
        memory: LiveBackup,
        flags: SharedFlags,
        on_event: Callable[..., object],
        *,
        tell_s: float,
    ) -> None:
        self._store, self._member_id, self._memory, self._flags = store, member_id, memory, flags
        self._on_event = on_event
        self._lock = threading.RLock()
        self._looked_at_s = time.monotonic()
        self._since_s: float | None = None
        """Since when this member is without a store; None: it has one."""
        self._said, self._said_at_s = "", 0.0
        self._meetings = Meetings(store)
        self._met: SplitBrain | None = None
        assert store.generation is not None, "the store in use is found before there is a member"
        memory.enter(store.generation, None)
        flags.set_generation(store.generation.number)
        store.on_silence = self.recover
        self._say_in_use(store.generation.number)
        self._closing = threading.Event()
        self._teller = threading.Thread(target=self._tell, args=(tell_s,), name="store-teller", daemon=True)
        self._teller.start()

    def _tell(self, every_s: float) -> None:
        """Tell stores that are not in use where the run goes on. Who comes to one of them later is told there."""
        while True:
            try:
                self._note(self._meetings.look(self._memory.known.committed))
            except Exception as error:  # noqa: BLE001 - a node that comes later depends on this thread
                _log.warning("cannot tell where the run goes on", extra={"fields": {"error": repr(error)}})
            if self._closing.wait(every_s):
                return

    def _note(self, met: SplitBrain | None) -> None:
        """Have the event log say once that the run has two lines of history."""
        if met is not None and met != self._met:
            self._met = met
            self._on_event("split_brain", goes_on=asdict(met.winner), ends=asdict(met.loser))

    def require_line(self) -> None:
        """Raise LineEnds where this member's line of history met another one, which goes on in its place."""
        met, committed = self._met, self._memory.known.committed
        if met is not None and committed is not None and committed.session == met.loser.session:
            raise LineEnds(
                f"two lines of this run have met, which went on without one another: {_shown(met.winner)} goes on; "
                f"{_shown(met.loser)}, which this node is of, ends here, and its checkpoints stay. To take part in the "
                "other one, start this node again with --run.start-over and another ckpt.path"
            )

    def recover(self) -> None:
        """Take steps towards a store, since the one in use is silent or lost its record. Raises Fenced."""
        until_s, is_there = time.monotonic() + _ASKING_S, False
        while not is_there and time.monotonic() < until_s:
            is_there = self._take_step(has_store=False)
            time.sleep(_PAUSE_S)

    def look_elsewhere(self) -> None:
        """See now and then whether the others have gone to another store, since too few members are at this one."""
        if time.monotonic() - self._looked_at_s > _AGAIN_S:
            self._looked_at_s = time.monotonic()
            self._take_step(has_store=True)

    def _take_step(self, *, has_store: bool) -> bool:
        """Do what the rules say. Whether that was to go to a store."""
        with self._lock:
            if self._flags.is_fenced:
                raise Fenced(f"{self._member_id} may not vote any more: the run went on without it")
            before, now_s = self._memory.generation, time.monotonic()
            if not has_store and self._since_s is None:
                self._since_s = now_s
            member_report = self._memory.member_report()
            seen = self._store.survey(self._member_id, member_report)
            stores = {candidate.store: store for store, candidate in seen}
            step = next_step(
                *([candidate for _, candidate in seen], member_report),
                has_store=has_store,
                has_waited=self._since_s is None or now_s - self._since_s > _ALL_TOLD_S,
            )
            match step:
                case Enter(candidate, generation):
                    self._since_s = None
                    self._store.enter(stores[candidate.store], generation)
                    view = self._store.view(0)
                    self._memory.enter(generation, view.plan)
                    self._memory.learn(view)  # before it reports that it is in this generation
                    self._flags.set_generation(generation.number)
                    if generation != before:
                        self._say_in_use(generation.number)
                case Pledge(generation):
                    self._memory.promise(generation)
                    self._flags.set_generation(generation.number)
                case Begin(candidate, generation, state):
                    stores[candidate.store].begin(generation, state)
                case Rejoin(candidate, generation):
                    self._store.enter(stores[candidate.store], generation)
                    self._flags.set_fenced(
                        True
                    )  # the generation began without what this member knows: it votes no more
                case KeepWaiting(reason):
                    self._say_waiting(reason)
            return isinstance(step, Enter | Rejoin)

    def _say_in_use(self, number: int) -> None:
        self._on_event("store_in_use", store=parse_store_url(self._store.address).shown, generation=number)

    def _say_waiting(self, reason: str) -> None:
        now_s = time.monotonic()
        if reason != self._said or now_s - self._said_at_s > _REMIND_S:
            self._said, self._said_at_s = reason, now_s
            _log.warning("waits for a store", extra={"fields": {"why": reason}})

    def close(self) -> None:
        """Stop; the store connection from now on follows the run by itself, for the node's next member."""
        self._closing.set()
        self._teller.join(_CLOSE_S)
        self._store.on_silence = self._store.follow


class Meetings:
    """Looks at all stores that a member knows, and tells those that are not in use where its line goes on.

    Members of the line whose session sorts first write the meeting down in their store, once; the others read it there,
    or where those could copy it to.
    """

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._lease_ends_ms: dict[str, dict[str, int]] = {}
        """Ends of the leases in other stores, as the look before this one showed them."""

    def look(self, committed: Verdict | None) -> SplitBrain | None:
        """Look once, and tell. `committed`: the newest verdict that this member knows."""
        own = Line.of(committed)
        self._store.tell_forward_pointer(own)
        if own is None:
            return None
        seen = self._store.survey()
        met = next((c.meeting for _, c in seen if c.meeting is not None and c.meeting.involves(own)), None)
        if met is None:
            met = detect_split_brain(own, [line for store, c in seen for line in self._living_lines(store, c)])
            met = None if met is None else self._own_of(seen).take_meeting(met)
        for store, candidate in seen if met is not None else ():
            is_of_either = candidate.line is not None and met is not None and met.involves(candidate.line)
            if met is not None and is_of_either and candidate.meeting is None:
                with suppress(StoreLost, ConfigError):
                    store.take_meeting(met)
        return met

    def _own_of(self, seen: list[tuple[RedisStore, StoreProbe]]) -> RedisStore:
        """The store in use, as one that is asked whatever session it is in."""
        return next((store for store, _ in seen if store.address == self._store.address), self._store)

    def _living_lines(self, store: RedisStore, candidate: StoreProbe) -> list[Line]:
        """The lines that a store tells of whose members live: they told it, or renew their leases in it."""
        told = [candidate.elsewhere.line] if candidate.elsewhere is not None else []
        if store.address != self._store.address and active_store([candidate]) is not None:
            with suppress(StoreLost, ConfigError):
                shown, ends_ms = parse_store_url(store.address).shown, store.lease_ends_ms()
                if self._lease_ends_ms.get(shown, ends_ms) != ends_ms:
                    told.append(candidate.line)
                self._lease_ends_ms[shown] = ends_ms
        return [line for line in told if line is not None]


def _shown(line: Line) -> str:
    return f"session {line.session} (round {line.round}, {line.tokens} tokens, {', '.join(line.members)})"
