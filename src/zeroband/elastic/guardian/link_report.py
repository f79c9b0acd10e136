"""What guardian and trainer tell one another of the node's links: small files in the node's shared memory.

The guardian writes how they are when something changed notably, the trainer over which of them it exchanges bytes and
whose key is banned. Neither waits for the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zeroband.elastic.membership.records import LinkRates

LINKS_FILE, PARTNERS_FILE, BANNED_FILE = "links.json", "partners.json", "banned.json"
"""Names of the files in the node's folder."""

EVERY_S = 3.0
"""Least time between two reports."""

_NOTABLE = 1.5
"""Factor by which a rate or a round trip is another one."""
_NOTABLE_MS = 5.0


@dataclass(frozen=True)
class LinkSeen:
    """The link to another member, as one guardian sees it."""

    mbit_s: int | None
    """Measured when the two met, a lower bound; None: not measured."""
    rtt_ms: float | None
    """The shortest round trip so far; None: there was no answer at all."""
    is_cut_off: bool
    """It did not answer for `fault.detect_s`."""
    way: str = "direct"
    """How the two are connected: direct, reversed (only the other end can dial), or the member that passes it on."""


Links = Mapping[str, LinkSeen]
"""By member."""


def is_notably_other(before: Links, now: Links) -> bool:
    """Whether a person would want to know that the links are these now."""
    return before.keys() != now.keys() or any(_is_other(before[member], now[member]) for member in now)


def _is_other(before: LinkSeen, now: LinkSeen) -> bool:
    if (before.is_cut_off, before.way) != (now.is_cut_off, now.way) or _differ(before.mbit_s, now.mbit_s):
        return True
    is_close = before.rtt_ms is not None and now.rtt_ms is not None and abs(before.rtt_ms - now.rtt_ms) < _NOTABLE_MS
    return not is_close and _differ(before.rtt_ms, now.rtt_ms)


def _differ(before: float | None, now: float | None) -> bool:
    if before is None or now is None:
        return before is not now
    return max(before, now) > _NOTABLE * min(before, now)


class LinkWriter:
    """The guardian's end. A file that cannot be written is done without."""

    def __init__(self, folder: Path, member_id: str) -> None:
        self._path = folder / LINKS_FILE
        self._member_id = member_id
        self._told: Links = {}
        self._told_at_s = float("-inf")

    def tell(self, links: Links, now_s: float) -> None:
        """Say how the links are, if that is news and the last news are old enough."""
        if now_s - self._told_at_s < EVERY_S or not is_notably_other(self._told, links):
            return
        self._told, self._told_at_s = links, now_s
        text = json.dumps({"member": self._member_id, "links": {m: asdict(link) for m, link in links.items()}})
        if not _write(self._path, text):
            self._told = {}  # the next time


class LinkReader:
    """The trainer's end, for one membership of the node."""

    def __init__(self, folder: Path, member_id: str) -> None:
        self._path = folder / LINKS_FILE
        self._member_id = member_id
        self._seen: Links = {}
        self._version = (0, 0)

    @property
    def rates(self) -> LinkRates:
        """What the last news say that a plan needs."""
        seen = dict(self._seen)
        rtts_ms = [link.rtt_ms for link in seen.values() if link.rtt_ms is not None]
        mbit = {member: link.mbit_s for member, link in seen.items() if link.mbit_s}
        return LinkRates(mbit, max(1, round(max(rtts_ms))) if rtts_ms else 0)

    def news(self) -> list[dict[str, Any]] | None:
        """All links of this member, as records for an event, where they are notably others than at the last news."""
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
        if written["member"] != self._member_id or not is_notably_other(self._seen, links):
            return None
        self._seen = links
        return [{"to": member, **asdict(link)} for member, link in sorted(links.items())]


class NamesWriter:
    """The trainer's end of a list of names.

    In PARTNERS_FILE: members with whom it exchanges bytes; the guardian probes them too. In
    BANNED_FILE: nodes whose keys are banned.
    """

    def __init__(self, folder: Path, file: str) -> None:
        self._path = folder / file
        self._told: frozenset[str] | None = None

    def tell(self, names: Iterable[str]) -> None:
        told = frozenset(names)
        if told != self._told and _write(self._path, json.dumps(sorted(told))):
            self._told = told


class NamesReader:
    """The guardian's end."""

    def __init__(self, folder: Path, file: str) -> None:
        self._path = folder / file

    def names(self) -> frozenset[str] | None:
        """What the trainer told; None: it told nothing. Then it may exchange bytes with all members."""
        try:
            return frozenset(json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return None


def _write(path: Path, text: str) -> bool:
    """Replace a file whole, if that can be."""
    whole = path.with_suffix(".new")
    try:
        whole.write_text(text, encoding="utf-8")
        whole.replace(path)
    except OSError:
        return False
    return True
