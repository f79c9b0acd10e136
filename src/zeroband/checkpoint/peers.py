"""Communication between the writers of one checkpoint's members, and its interpretation.

Each member publishes a record of the files that it wrote, or that it wrote none, next to the files, under a name of
this attempt, so that earlier leftovers do not count. If the run has a token, the record has a MAC: only a member's own
record counts. During the save the writers report through the run's store whether they work, wait or fail. Their
trainers carry these reports, and add which nodes the run has lost.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TextIO, cast

from pydantic import TypeAdapter

from zeroband.checkpoint.layout import PARTS
from zeroband.checkpoint.manifest import FILES, CheckpointKey, StoredFile
from zeroband.checkpoint.storage import Storage

IDLE, PROGRESS, UNAVAILABLE = "idle", "progress", "unavailable"
"""Kinds of lines to the trainer besides the events of a save."""

_LONGEST_WHY = 500
"""In characters."""
_SAY_S = 1.0


@dataclass(frozen=True)
class WriterStatus:
    """A writer's report on its member in a save."""

    beats: int = 0
    """Counter that grows while it works or waits."""
    is_waiting: bool = False
    """Whether its share is written, so that its record should be visible."""
    out: str | None = None
    """Why no member needs to wait for it; None while it works."""
    is_lost: bool = False
    """Whether the run has lost it, as this node's trainer knows; never reported by the member itself."""

    def to_json(self) -> str:
        """Return the report for the store."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "is_lost"})

    @staticmethod
    def parse(text: str) -> WriterStatus | None:
        """Parse a report; None if it is invalid: anyone who reaches the store may have written it."""
        try:
            word = _WORD.validate_json(text, strict=True)
        except ValueError:
            return None
        return replace(word, is_lost=False, out=None if word.out is None else word.out[:_LONGEST_WHY])


_WORD = TypeAdapter(WriterStatus)
LOST = WriterStatus(out="the run continues without it", is_lost=True)


class WriterLine:
    """A writer's line to its trainer, which carries its reports to other writers and theirs to it. Any thread.

    Also the clock of its saves, and the fault points of tests.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._written = self._said = 0
        self._began_at_s = self._said_at_s = time.monotonic()
        self._is_waiting = False
        self._peers: Mapping[str, WriterStatus] = {}

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def at(self, point: str) -> None:
        """Pass a fault point."""

    def peer_status(self, member: str) -> WriterStatus:
        """Return the latest report of another member in the current save."""
        return self._peers.get(member, WriterStatus())

    def hear(self, peers: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the other members' reports in the current save."""
        self._peers = {node: WriterStatus(**word) for node, word in peers.items()}

    def tell(self, kind: str, **fields: Any) -> None:
        """Report an event of the save."""
        with self._lock:
            self._say({"kind": kind, **fields})

    def report_unavailable(self, attempt: str, why: str | None) -> None:
        """Tell the other members not to wait for this node in this save; None revokes that."""
        self.tell(UNAVAILABLE, attempt=attempt, why=why)

    def begin(self) -> None:
        """Begin a save, and count its bytes from here."""
        with self._lock:
            self._written = self._said = 0
            self._is_waiting = False
            self._began_at_s = self._said_at_s = time.monotonic()
            self._show(at_once=True)

    def end(self) -> None:
        """End the save: the writer is free again."""
        with self._lock:
            rate = self._written / max(time.monotonic() - self._began_at_s, 1e-6)
            self._say_progress(rate)
            self._say({"kind": IDLE})

    def count(self, written_bytes: int) -> None:
        """Add bytes that were passed to the storage."""
        with self._lock:
            self._written += written_bytes
            self._show()

    def working(self, *, is_waiting: bool) -> None:
        """Report that this node works, or waits for the others."""
        with self._lock:
            has_changed, self._is_waiting = is_waiting != self._is_waiting, is_waiting
            self._show(at_once=has_changed)

    def _show(self, *, at_once: bool = False) -> None:
        since_s = time.monotonic() - self._said_at_s
        if since_s >= _SAY_S or at_once:
            self._say_progress((self._written - self._said) / max(since_s, 1e-6))
            self._said, self._said_at_s = self._written, time.monotonic()

    def _say_progress(self, rate: float) -> None:
        progress = {"written_bytes": self._written, "bytes_per_s": round(rate), "is_waiting": self._is_waiting}
        self._say({"kind": PROGRESS, **progress})

    def _say(self, message: Mapping[str, Any]) -> None:
        try:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()
        except BrokenPipeError:  # the trainer has ended: finish its order
            pass


@dataclass(frozen=True)
class Shares:
    """The records of one attempt at a checkpoint. Any thread."""

    storage: Storage
    folder: str
    """Name of the checkpoint's temporary folder."""
    attempt: str
    outer: Collection[str]
    """Paths of the outer state's files, each written by any member."""
    key: CheckpointKey | None = None
    """Key derived from the run's token, if any."""

    def publish(self, member: str, files: Mapping[str, StoredFile]) -> None:
        """Publish the files of a member. Raises OSError."""
        record = {"files": FILES.dump_python(dict(files), exclude_defaults=True)}
        mac = "" if self.key is None else self.key.mac(self._kind(member), _text(record))
        self.storage.write(self._path(member), (_text({**record, **({"mac": mac} if mac else {})}),))

    def leave_out(self, member: str) -> None:
        """Publish that a member does not take part; never raises."""
        with contextlib.suppress(OSError):
            self.publish(member, {})

    def read(self, member: str) -> dict[str, StoredFile] | None:
        """Return a member's files, empty if it does not take part; None without a valid record."""
        try:
            record = cast("dict[str, Any]", json.loads(self.storage.read(self._path(member))))
            mac = str(record.pop("mac", ""))
            if self.key is not None and not self.key.is_mac(self._kind(member), _text(record), mac):
                return None
            files = FILES.validate_json(json.dumps(record["files"]), strict=True)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        return {path: file for path, file in files.items() if path in self.outer or path.startswith(f"nodes/{member}/")}

    def _path(self, member: str) -> str:
        return f"{self.folder}/{PARTS}/{self.attempt}-{member}.json"

    def _kind(self, member: str) -> str:
        return f"share {self.attempt} {member}"


class Peers:
    """The members of one save, seen by one of them.

    `leave_out` may be called in any thread, all else in the save's. `members`: sorted; they commit in this order.
    `peer_wait_s`: longest silence of another member.
    """

    def __init__(
        self, shares: Shares, line: WriterLine, node_id: str, members: Sequence[str], peer_wait_s: float
    ) -> None:
        self._shares = shares
        self._line = line
        self._node_id = node_id
        self.ahead = tuple(members[: members.index(node_id)])
        """Members that commit before this node."""
        self.others = tuple(member for member in members if member != node_id)
        self._peer_wait_s = peer_wait_s
        self._listening_since_s = 0.0
        self._signs: dict[str, tuple[object, float]] = {}
        """The latest sign of each member, and its time."""

    def report_unavailable(self, why: str | None) -> None:
        """Tell the others not to wait for this node; None revokes that."""
        if self.others:
            self._line.report_unavailable(self._shares.attempt, why)

    def leave_out(self, why: str) -> None:
        """Tell the others not to wait for this node, which does not take part; never raises."""
        if self.others:
            self.report_unavailable(why)
            self._shares.leave_out(self._node_id)

    def reset_silence(self, from_s: float) -> None:
        """Start measuring silence."""
        self._listening_since_s = from_s
        self._signs.clear()

    def is_turn(self) -> bool:
        """Whether all members that commit before this node are unavailable or silent."""
        silence_s = 2 * len(self.ahead) * self._peer_wait_s
        quiet = [self._is_silent(member, silence_s, counts_waiting=True) for member in self.ahead]
        return all(
            is_quiet or self._why_out(member, self._shares.read(member)) is not None
            for member, is_quiet in zip(self.ahead, quiet, strict=True)
        )

    def files_or_reason(self, member: str) -> tuple[Mapping[str, StoredFile], str]:
        """Return a member's files, if published, and otherwise why not to wait for it; empty: wait."""
        files = self._shares.read(member)
        if files:
            return files, ""
        is_silent = self._is_silent(member, self._peer_wait_s, counts_waiting=False)
        silence = f"nothing was heard of its share for {self._peer_wait_s:g} s" if is_silent else ""
        return {}, self._why_out(member, files) or silence

    def is_last_committer(self) -> bool:
        """Whether no other member can still commit; one with a failing storage may."""
        return all(self._line.peer_status(m).is_lost or self._shares.read(m) == {} for m in self.others)

    def _why_out(self, member: str, files: Mapping[str, StoredFile] | None) -> str | None:
        """Return why a member takes no part; None if it does, or may. `files`: of its record."""
        return self._line.peer_status(member).out or ("it did not take part" if files == {} else None)

    def _is_silent(self, member: str, silence_s: float, *, counts_waiting: bool) -> bool:
        """Whether a member was silent for too long. `counts_waiting`: reports of waiting count as signs."""
        status = self._line.peer_status(member)
        sign = status.beats if counts_waiting or not status.is_waiting else "waiting"
        known, since_s = self._signs.get(member, (0, self._listening_since_s))
        if sign != known:
            since_s = self._line.now_s()
        self._signs[member] = sign, since_s
        return self._line.now_s() - since_s >= silence_s


def _text(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()
