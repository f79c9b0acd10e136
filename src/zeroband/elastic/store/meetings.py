"""Notices that a run has a second line of history, which a machine founded that was cut off. One thread of a member."""

from __future__ import annotations

from contextlib import suppress

from zeroband.config.store_url import parse_store_url
from zeroband.elastic.membership.records import Verdict
from zeroband.elastic.membership.succession import Line, Meeting, StoreProbe, in_use, meeting_of
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import ConfigError, StoreLost


class Meetings:
    """Looks at all stores that a member knows, and tells those that are not in use where its line goes on.

    Members of the line whose session sorts first write the meeting down in their store, once; the others read it there,
    or where those could copy it to.
    """

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._lease_ends_ms: dict[str, dict[str, int]] = {}
        """Ends of the leases in other stores, as the look before this one showed them."""

    def look(self, committed: Verdict | None) -> Meeting | None:
        """Look once, and tell. `committed`: the newest verdict that this member knows."""
        own = Line.of(committed)
        self._store.tell_whereabouts(own)
        if own is None:
            return None
        seen = self._store.survey()
        met = next((c.meeting for _, c in seen if c.meeting is not None and c.meeting.concerns(own)), None)
        if met is None:
            met = meeting_of(own, [line for store, c in seen for line in self._living_lines(store, c)])
            met = None if met is None else self._own_of(seen).take_meeting(met)
        for store, candidate in seen if met is not None else ():
            is_of_either = candidate.line is not None and met is not None and met.concerns(candidate.line)
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
        if store.address != self._store.address and in_use([candidate]) is not None:
            with suppress(StoreLost, ConfigError):
                shown, ends_ms = parse_store_url(store.address).shown, store.lease_ends_ms()
                if self._lease_ends_ms.get(shown, ends_ms) != ends_ms:
                    told.append(candidate.line)
                self._lease_ends_ms[shown] = ends_ms
        return [line for line in told if line is not None]
