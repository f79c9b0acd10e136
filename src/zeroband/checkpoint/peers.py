"""What the writers of one save's members tell each other, and what a save makes of it.

Each leaves a record of the files that it wrote, or that it wrote none, next to the files, under a name of this attempt,
so that what an earlier one left does not count. Where the run has a token the record carries a MAC: what a member
commits on another's word must be that member's. Meanwhile they say through the run's store whether they work, wait or
fail; their trainers carry that, and add which nodes the run has lost.
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

from zeroband.checkpoint.authenticity import CheckpointKey
from zeroband.checkpoint.layout import PARTS
from zeroband.checkpoint.manifest import FILES, StoredFile
from zeroband.checkpoint.storage import Storage

IDLE, PROGRESS, UNAVAILABLE = "idle", "progress", "unavailable"
"""Kinds of lines to the trainer besides the events of a save."""

_LONGEST_WHY = 500
"""Characters."""
_SAY_S = 1.0


@dataclass(frozen=True)
class PeerWord:
    """What a member's writer says of itself in a save."""

    beats: int = 0
    """Grows as long as it works at its share, or waits for the others."""
    is_waiting: bool = False
    """Whether it has written its share and waits, so that its record ought to be seen."""
    out: str | None = None
    """Why no member needs to wait for it; None: it is at work, for all that is known."""
    is_lost: bool = False
    """The run goes on without it, as this node's trainer knows; no member says that of itself."""

    def to_json(self) -> str:
        """What is said through the store."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "is_lost"})

    @staticmethod
    def parse(text: str) -> PeerWord | None:
        """The inverse; None of what is no such word, which anybody may have written who reaches the store."""
        try:
            word = _WORD.validate_json(text, strict=True)
        except ValueError:
            return None
        return replace(word, is_lost=False, out=None if word.out is None else word.out[:_LONGEST_WHY])


_WORD = TypeAdapter(PeerWord)
LOST = PeerWord(out="the run goes on without it", is_lost=True)


class WriterLine:
    """A writer's line to its trainer, which carries what it says to the other writers and hears of them. Any thread.

    Also the time of its saves, and the points where a test lets something happen.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._written = self._said = 0
        self._began_at_s = self._said_at_s = time.monotonic()
        self._is_waiting = False
        self._peers: Mapping[str, PeerWord] = {}

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def at(self, point: str) -> None:
        """Pass a named point of a save."""

    def peer_status(self, member: str) -> PeerWord:
        """What is known of another member of the save in hand."""
        return self._peers.get(member, PeerWord())

    def hear(self, peers: Mapping[str, Mapping[str, Any]]) -> None:
        """Note what is known of the other members of the save in hand; of none when another one is ordered."""
        self._peers = {node: PeerWord(**word) for node, word in peers.items()}

    def tell(self, kind: str, **fields: Any) -> None:
        """Report an event of the save."""
        with self._lock:
            self._say({"kind": kind, **fields})

    def report_unavailable(self, attempt: str, why: str | None) -> None:
        """Tell the other members not to wait for this node in this save, or, with None, that they may."""
        self.tell(UNAVAILABLE, attempt=attempt, why=why)

    def begin(self) -> None:
        """A save begins: its bytes are counted from here."""
        with self._lock:
            self._written = self._said = 0
            self._is_waiting = False
            self._began_at_s = self._said_at_s = time.monotonic()
            self._show(at_once=True)

    def end(self) -> None:
        """The save is over, and the writer free again."""
        with self._lock:
            rate = self._written / max(time.monotonic() - self._began_at_s, 1e-6)
            self._say_progress(rate)
            self._say({"kind": IDLE})

    def count(self, written_bytes: int) -> None:
        """Take note that this many bytes more were handed to the storage."""
        with self._lock:
            self._written += written_bytes
            self._show()

    def working(self, *, is_waiting: bool) -> None:
        """Show the other members that this node is at work, or that it has written its share and waits."""
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
        except BrokenPipeError:  # the trainer is gone: finish what it ordered
            pass


@dataclass(frozen=True)
class Shares:
    """The records of one attempt at one checkpoint. Any thread."""

    storage: Storage
    folder: str
    """Name of the checkpoint's folder while it is written."""
    attempt: str
    outer: Collection[str]
    """Paths of the outer state's files, of which any member may have written any."""
    key: CheckpointKey | None = None
    """Key made of the run's token; None: it has none."""

    def publish(self, member: str, files: Mapping[str, StoredFile]) -> None:
        """Say that these files of a member are in place. Raises OSError."""
        record = {"files": FILES.dump_python(dict(files), exclude_defaults=True)}
        mac = "" if self.key is None else self.key.mac(self._kind(member), _text(record))
        self.storage.write(self._path(member), (_text({**record, **({"mac": mac} if mac else {})}),))

    def leave_out(self, member: str) -> None:
        """Say that a member does not take part, so that it is not waited for; never raises."""
        with contextlib.suppress(OSError):
            self.publish(member, {})

    def read(self, member: str) -> dict[str, StoredFile] | None:
        """The files of a member; empty: it does not take part. None while there is no record that makes sense."""
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
    """The members of one save, as one of them sees them. `leave_out` in any thread, all else in that of the save.

    `members`: sorted; they commit in this order. `peer_wait_s`: longest silence of another member.
    """

    def __init__(
        self, shares: Shares, line: WriterLine, node_id: str, members: Sequence[str], peer_wait_s: float
    ) -> None:
        self._shares = shares
        self._line = line
        self._node_id = node_id
        self.ahead = tuple(members[: members.index(node_id)])
        """Members whose turn to commit comes before this node's."""
        self.others = tuple(member for member in members if member != node_id)
        self._peer_wait_s = peer_wait_s
        self._listening_since_s = 0.0
        self._signs: dict[str, tuple[object, float]] = {}
        """The newest sign of each member, and since when it is that."""

    def report_unavailable(self, why: str | None) -> None:
        """Tell the others not to wait for this node, or, with None, that they may."""
        if self.others:
            self._line.report_unavailable(self._shares.attempt, why)

    def leave_out(self, why: str) -> None:
        """Tell the others not to wait for this node, which does not take part; never raises."""
        if self.others:
            self.report_unavailable(why)
            self._shares.leave_out(self._node_id)

    def listen_from(self, from_s: float) -> None:
        """Count silence from this time on."""
        self._listening_since_s = from_s
        self._signs.clear()

    def are_out_ahead(self) -> bool:
        """Whether all whose turn comes before this node's are out, or silent for too long."""
        silence_s = 2 * len(self.ahead) * self._peer_wait_s
        quiet = [self._is_silent(member, silence_s, counts_waiting=True) for member in self.ahead]
        return all(
            is_quiet or self._why_out(member, self._shares.read(member)) is not None
            for member, is_quiet in zip(self.ahead, quiet, strict=True)
        )

    def look_for(self, member: str) -> tuple[Mapping[str, StoredFile], str]:
        """The files that a member wrote; where there are none yet, why not to wait for it: empty, if one should."""
        files = self._shares.read(member)
        if files:
            return files, ""
        is_silent = self._is_silent(member, self._peer_wait_s, counts_waiting=False)
        silence = f"nothing was heard of its share for {self._peer_wait_s:g} s" if is_silent else ""
        return {}, self._why_out(member, files) or silence

    def have_ended(self) -> bool:
        """Whether no other member will ever commit: one that only says that its storage fails may do so yet."""
        return all(self._line.peer_status(m).is_lost or self._shares.read(m) == {} for m in self.others)

    def _why_out(self, member: str, files: Mapping[str, StoredFile] | None) -> str | None:
        """Why this member takes no part; None: it does, or may. `files`: of its record."""
        return self._line.peer_status(member).out or ("it did not take part" if files == {} else None)

    def _is_silent(self, member: str, silence_s: float, *, counts_waiting: bool) -> bool:
        """Whether nothing was heard of a member for so long. `counts_waiting`: that it waits for others is a sign."""
        status = self._line.peer_status(member)
        sign = status.beats if counts_waiting or not status.is_waiting else "waiting"
        known, since_s = self._signs.get(member, (0, self._listening_since_s))
        if sign != known:
            since_s = self._line.now_s()
        self._signs[member] = sign, since_s
        return self._line.now_s() - since_s >= silence_s


def _text(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()
