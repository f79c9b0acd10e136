"""Files in the node's shared memory through which guardian and trainer exchange what they know of links.

The guardian writes the state of the links after a notable change; the trainer writes its partners of exchange and the
banned nodes. Neither waits for the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroband.elastic.membership.records import LinkRates

LINKS_FILE, PARTNERS_FILE, BANNED_FILE = "links.json", "partners.json", "banned.json"
"""File names."""

INTERVAL_S = 3.0
"""Shortest time between two reports."""

_NOTABLE_FACTOR = 1.5
"""A rate or round trip that changes by this factor is reported."""
_NOTABLE_MS = 5.0
"""A round trip that changes by less is not."""


@dataclass(frozen=True)
class LinkSeen:
    """The link to another member, as this guardian sees it."""

    mbit_s: int | None
    """Rate measured when the two first connected, a lower bound; None: not measured."""
    rtt_ms: float | None
    """Shortest round trip so far; None: no answer yet."""
    is_cut_off: bool
    """It did not answer for `fault.detect_s`."""
    way: str = "direct"
    """How the two are connected: direct, reversed (only the other end can dial), or the member that relays."""


Links = Mapping[str, LinkSeen]
"""By member."""


def is_notable_change(before: Links, now: Links) -> bool:
    """Whether links changed enough to report it."""
    return before.keys() != now.keys() or any(_has_changed(before[member], now[member]) for member in now)


def _has_changed(before: LinkSeen, now: LinkSeen) -> bool:
    if (before.is_cut_off, before.way) != (now.is_cut_off, now.way) or _differ(before.mbit_s, now.mbit_s):
        return True
    is_close = before.rtt_ms is not None and now.rtt_ms is not None and abs(before.rtt_ms - now.rtt_ms) < _NOTABLE_MS
    return not is_close and _differ(before.rtt_ms, now.rtt_ms)


def _differ(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return before is not now
    return max(before, now) > _NOTABLE_FACTOR * min(before, now)


class LinkWriter:
    """The guardian's end. Errors of the file system are ignored."""

    def __init__(self, folder: Path, member_id: str) -> None:
        self._path = folder / LINKS_FILE
        self._member_id = member_id
        self._written: Links = {}
        self._written_at_s = float("-inf")

    def write(self, links: Links, now_s: float) -> None:
        """Write the links after a notable change, at most once per `INTERVAL_S`."""
        if now_s - self._written_at_s < INTERVAL_S or not is_notable_change(self._written, links):
            return
        self._written, self._written_at_s = links, now_s
        text = json.dumps({"member": self._member_id, "links": {m: asdict(link) for m, link in links.items()}})
        if not _replace(self._path, text):
            self._written = {}  # retry


class LinkReader:
    """The trainer's end, for one membership of the node."""

    def __init__(self, folder: Path, member_id: str) -> None:
        self._path = folder / LINKS_FILE
        self._member_id = member_id
        self._seen: Links = {}
        self._version = (0, 0)

    @property
    def rates(self) -> LinkRates:
        """The part of the last report that a plan needs."""
        seen = dict(self._seen)
        rtts_ms = [link.rtt_ms for link in seen.values() if link.rtt_ms is not None]
        mbit = {member: link.mbit_s for member, link in seen.items() if link.mbit_s}
        return LinkRates(mbit, max(1, round(max(rtts_ms))) if rtts_ms else 0)

    def read_changes(self) -> list[dict[str, Any]] | None:
        """Return all links as records for an event after a notable change; None: there was none."""
        try:
            status = self._path.stat()
            version = (status.st_ino, status.st_mtime_ns)
            if version == self._version:
                return None
            written: Any = json.loads(self._path.read_text(encoding="utf-8"))
            links = {member: LinkSeen(**link) for member, link in written["links"].items()}
        except (OSError, ValueError, TypeError, KeyError):
            return None
        self._version = version
        if written["member"] != self._member_id or not is_notable_change(self._seen, links):
            return None
        self._seen = links
        return [{"to": member, **asdict(link)} for member, link in sorted(links.items())]


class NamesFile:
    """A list of names that the trainer writes and the guardian reads.

    PARTNERS_FILE: members with whom the trainer exchanges bytes, which the guardian then probes. BANNED_FILE: nodes
    whose keys are banned.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self._path = folder / file
        self._written: frozenset[str] | None = None

    def write(self, names: Iterable[str]) -> None:
        new = frozenset(names)
        if new != self._written and _replace(self._path, json.dumps(sorted(new))):
            self._written = new

    def read(self) -> frozenset[str] | None:
        """Return the list; None: the trainer has not written one, so it may exchange bytes with all members."""
        try:
            return frozenset(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None


def _replace(path: Path, text: str) -> bool:
    """Replace a file atomically. Returns whether that worked."""
    new = path.with_suffix(".new")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(path)
    except OSError:
        return False
    return True
