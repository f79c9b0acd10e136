"""Saving one checkpoint: this node's share of the files, then, on one of the members, the commit. Runs in the writer.

Members write side by side: each its share of the outer state and its own state, then a record of sizes and hashes. The
first of them waits for the others' records, writes what a lost one left, then the manifest; renaming the folder commits
(on stores without renames the manifest itself does, which appears whole or not at all). Then `latest`, then clean-up.

All members hold the same outer state, so any of them can commit. Each stays until somebody has, and takes its turn when
those before it are out: they said so, or the run lost them, or they were waited for long enough. A member that was only
slow may then commit as well: what both write has the same bytes, and each looks before it replaces what is committed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import xxhash

from zeroband.checkpoint.layout import (
    LATEST,
    MANIFEST,
    PARTS,
    TEMPORARY,
    OuterFile,
    OuterPlan,
    Slot,
    folder_of,
    inner_header,
)
from zeroband.checkpoint.loading import open_checkpoint
from zeroband.checkpoint.manifest import Manifest, Stamp, StoredFile
from zeroband.checkpoint.owner import require
from zeroband.checkpoint.retention import clean_up, remove_checkpoint
from zeroband.checkpoint.shares import Shares
from zeroband.checkpoint.storage import Data, Storage, reason_of
from zeroband.errors import CheckpointDamaged, CheckpointFailed

POINTS = (
    "staged",
    "mid_write",
    "share_written",
    "published",
    "before_manifest",
    "before_rename",
    "renamed",
    "latest",
    "clean_up",
)
"""Named places of a save, in its order, where tests kill the writer."""

_PIECE_BYTES = 16 << 20
_LONGEST_PAUSE_S = 30.0
"""Between two attempts at a file."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0
"""Between two looks for what the other members wrote."""

T = TypeVar("T")


@dataclass(frozen=True)
class SaveRules:
    """How a save behaves, of the run's configuration."""

    keep_last: int
    keep_every: int | None
    peer_wait_s: float
    """Longest wait of who commits for the others' records; the next member waits for it twice as long."""
    retry_s: float
    """Longest time for which one file is tried again."""
    files_at_once: int = 2


class Surroundings(Protocol):
    """What a save needs of its process: time, a place to report to, and points where a test may end it."""

    def now_s(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def tell(self, kind: str, **fields: Any) -> None:
        """Report an event of the save. Any thread."""
        ...

    def count(self, written_bytes: int) -> None:
        """So many bytes more were handed to the storage. Any thread."""
        ...

    def lost(self) -> Collection[str]:
        """Node ids that the run went on without since this was staged. Any thread."""
        ...

    def at(self, point: str) -> None: ...


@dataclass(frozen=True)
class Staged:
    """The copies that a save reads. Nobody writes to them until it is over."""

    slots: Sequence[Slot]
    plan: OuterPlan
    outer: Mapping[str, memoryview]
    """The bytes of the flat float32 buffers of the outer state, by section."""
    inner: Mapping[str, memoryview]
    """Of the node's inner optimizer; none where the outer state holds them."""
    node_state: Mapping[str, Any]
    """Counters and random states; JSON."""


class Save:
    """One checkpoint as this node writes it.

    `members`: the node ids that share the work, sorted; this one among them.
    """

    def __init__(
        self,
        storage: Storage,
        stamp: Stamp,
        staged: Staged,
        node_id: str,
        members: Sequence[str],
        rules: SaveRules,
        around: Surroundings,
    ) -> None:
        self._storage = storage
        self._stamp = stamp
        self._staged = staged
        self._node_id = node_id
        self._members = tuple(members)
        self._rules = rules
        self._around = around
        self._final = folder_of(stamp.inner_step)
        self._folder = f"{self._final}{TEMPORARY}" if storage.renames else self._final
        self._files: dict[str, StoredFile] = {}
        self._shares = Shares(storage, self._folder, stamp.attempt, staged.plan.paths)
        self._is_published = False
        """Others may build on this node's files."""

    @property
    def _ahead(self) -> tuple[str, ...]:
        """Members whose turn to commit comes before this node's."""
        return self._members[: self._members.index(self._node_id)]

    @property
    def _others(self) -> tuple[str, ...]:
        return tuple(member for member in self._members if member != self._node_id)

    def run(self) -> bool:
        """Write, and commit in one's turn. Returns whether the checkpoint stands; failures are told, not raised."""
        try:
            self._run()
        except CheckpointFailed as error:
            if not self._stands():  # another member may have committed it meanwhile, files and all
                self._give_up(str(error))
                return False
        return True

    def _run(self) -> None:
        from_s = self._around.now_s()
        self._around.at("staged")
        self._retry("owner.json", partial(require, self._storage, self._stamp.session))
        if self._is_done():
            return
        self._write_share(self._staged.plan.share(self._members)[self._node_id], with_indices=not self._ahead)
        self._write_node()
        self._around.at("share_written")
        self._publish()
        self._around.at("published")
        if self._ahead:
            stored = sum(file.size for file in self._files.values())
            self._around.tell("checkpoint_share_written", **self._place(), bytes=stored, took_s=self._since(from_s))
        written_at_s = self._around.now_s()
        if not self._await_turn(written_at_s):
            return
        self._gather(written_at_s + self._rules.peer_wait_s)
        self._commit()
        total = sum(file.size for file in self._files.values())
        self._around.tell("checkpoint_committed", **self._place(), bytes=total, took_s=self._since(from_s))
        self._tidy()

    def _place(self) -> dict[str, Any]:
        return {"round": self._stamp.round, "step": self._stamp.inner_step}

    def _since(self, from_s: float) -> float:
        return round(self._around.now_s() - from_s, 3)

    def _committed_attempt(self) -> str | None:
        """Which save of this step is committed; None: there is none to be seen."""
        try:
            return open_checkpoint(self._storage, self._stamp.inner_step).manifest.stamp.attempt
        except CheckpointDamaged:
            return None

    def _stands(self) -> bool:
        """Whether this very save is committed, by whichever member."""
        return self._committed_attempt() == self._stamp.attempt

    def _is_done(self) -> bool:
        """Whether it stands already; another save in its place is uncommitted where folders do not rename."""
        found = self._committed_attempt()
        if found not in (None, self._stamp.attempt) and not self._storage.renames:
            self._retry(MANIFEST, lambda: self._storage.remove(f"{self._final}/{MANIFEST}"))
        return found == self._stamp.attempt

    def _write_share(self, files: Sequence[OuterFile], *, with_indices: bool) -> None:
        for path, data in self._staged.plan.indices.items() if with_indices else ():
            self._write(path, lambda data=data: iter((data,)))
        with ThreadPoolExecutor(self._rules.files_at_once, thread_name_prefix="checkpoint-write") as pool:
            for done in [pool.submit(self._write, file.path, partial(self._pieces, file)) for file in files]:
                done.result()

    def _pieces(self, file: OuterFile) -> Iterator[Data]:
        yield file.header()
        for piece in _cut(self._staged.outer[file.section][4 * file.start : 4 * file.stop]):
            yield piece
            self._around.at("mid_write")

    def _inner_pieces(self) -> Iterator[Data]:
        yield inner_header(self._staged.slots, tuple(self._staged.inner))
        for buffer in self._staged.inner.values():
            yield from _cut(buffer)

    def _write_node(self) -> None:
        folder = f"nodes/{self._node_id}"
        state = json.dumps(self._staged.node_state, sort_keys=True).encode()
        self._write(f"{folder}/state.json", lambda: iter((state,)))
        if self._staged.inner:
            self._write(f"{folder}/inner.safetensors", self._inner_pieces)

    def _write(self, path: str, pieces: Callable[[], Iterable[Data]]) -> None:
        self._retry(path, lambda: self._store(path, pieces()))

    def _store(self, path: str, pieces: Iterable[Data]) -> None:
        """Write a file of the checkpoint, and note its size and hash."""
        seen, size = xxhash.xxh3_128(), 0

        def passing() -> Iterator[Data]:
            nonlocal size
            for piece in pieces:
                seen.update(piece)
                yield piece
                size += memoryview(piece).nbytes
                self._around.count(memoryview(piece).nbytes)

        self._storage.write(f"{self._folder}/{path}", passing())
        self._files[path] = StoredFile(size, seen.hexdigest())

    def _retry(self, what: str, action: Callable[[], T]) -> T:
        """Try again with growing pauses. Raises CheckpointFailed when the patience is over."""
        from_s, pause_s = self._around.now_s(), 0.5
        while True:
            try:
                return action()
            except OSError as error:
                reason = f"{self._storage.url}/{self._folder}/{what}: {reason_of(error)}"
                if self._around.now_s() - from_s + pause_s > self._rules.retry_s:
                    raise CheckpointFailed(reason) from error
                self._around.tell("checkpoint_retrying", **self._place(), reason=reason)
            self._around.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    # -- between the members -------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self._others:
            self._retry(PARTS, lambda: self._shares.publish(self._node_id, self._files))
            self._is_published = True

    def leave_out(self) -> None:
        """Tell the others not to wait for this node, which does not take part. Any thread; never raises."""
        if self._others:
            self._shares.leave_out(self._node_id)

    def _is_out(self, member: str) -> bool:
        """Whether this member will not commit any more."""
        return member in self._around.lost() or self._shares.read(member) == {}

    def _await_turn(self, from_s: float) -> bool:
        """Wait until all members before this one are out, or had the time for it; False when the checkpoint stands."""
        until_s = from_s + 2 * len(self._ahead) * self._rules.peer_wait_s
        pauses = self._pauses()
        while not all(self._is_out(member) for member in self._ahead) and self._around.now_s() < until_s:
            if self._stands():
                return False
            next(pauses)
        return not self._stands()

    def _gather(self, until_s: float) -> None:
        """Take over the others' records; write oneself what is missing when the wait is over."""
        missing, pauses = set(self._others), self._pauses()
        while True:
            for member in sorted(missing):
                files = self._shares.read(member)
                if files is not None:
                    self._files |= files
                    missing.remove(member)
            if not missing - set(self._around.lost()) or self._around.now_s() >= until_s:
                break
            next(pauses)
        if missing:
            self._around.tell("checkpoint_without", **self._place(), nodes=sorted(missing))
        plan = self._staged.plan
        left = [file for file in plan.files if file.path not in self._files]
        self._write_share(left, with_indices=not plan.indices.keys() <= self._files.keys())

    def _pauses(self) -> Iterator[None]:
        """Sleeps between two looks at the storage: short ones first."""
        pause_s = _SHORTEST_LOOK_S
        while True:
            self._around.sleep(pause_s)
            yield
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)

    # -- the commit ----------------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        self._require_stored(self._folder)
        self._retry("owner.json", partial(require, self._storage, self._stamp.session))
        self._around.at("before_manifest")
        manifest = Manifest(self._stamp, self._files).to_json()
        self._retry(MANIFEST, lambda: self._storage.write(f"{self._folder}/{MANIFEST}", (manifest,)))
        self._around.at("before_rename")
        is_ours = not self._storage.renames or self._retry(self._final, self._rename)
        self._around.at("renamed")
        if is_ours:
            self._require_whole()
        self._retry(LATEST, lambda: self._storage.write(LATEST, (f"{self._final}\n".encode(),)))
        self._around.at("latest")

    def _require_stored(self, folder: str) -> None:
        """What the storage lists is what was written."""
        found = self._retry("its files", lambda: self._storage.sizes(folder))
        for path, file in self._files.items():
            if found.get(path) != file.size:
                raise CheckpointFailed(f"{folder}/{path} was written with {file.size} bytes, has {found.get(path, 0)}")

    def _rename(self) -> bool:
        """Put the folder in its place; False where another member was quicker."""
        if self._final in self._storage.names():
            if self._stands():
                return False
            remove_checkpoint(self._storage, self._stamp.inner_step)  # of a save before a rollback
        self._storage.rename(self._folder, self._final)
        return True

    def _require_whole(self) -> None:
        """Take the commit back if files went meanwhile: others cleaned up after a node that stood still for so long."""
        try:
            self._require_stored(self._final)
        except CheckpointFailed:
            self._retry(self._final, partial(remove_checkpoint, self._storage, self._stamp.inner_step))
            raise

    def _tidy(self) -> None:
        """Clean up; a failure is told and tried again after the next checkpoint."""
        keep_last, keep_every = self._rules.keep_last, self._rules.keep_every
        step = self._stamp.inner_step
        try:
            self._storage.remove(f"{self._final}/{PARTS}")
            removed = clean_up(self._storage, step, keep_last=keep_last, keep_every=keep_every, at=self._around.at)
        except OSError as error:
            self._around.tell("checkpoint_retrying", **self._place(), reason=f"clean-up: {reason_of(error)}")
            return
        if removed:
            self._around.tell("checkpoints_removed", steps=removed)

    def _give_up(self, reason: str) -> None:
        """Say why, and give back the space: of this node's files, or of everybody's when nobody is left to commit."""
        self._around.tell("checkpoint_failed", **self._place(), reason=reason)
        is_last = all(self._is_out(member) for member in self._others)
        with contextlib.suppress(OSError):
            if is_last and self._storage.renames:
                self._storage.remove(self._folder)
            elif self._storage.renames and not self._is_published:
                for path in self._files:
                    self._storage.remove(f"{self._folder}/{path}")
        if not is_last:
            self.leave_out()


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _PIECE_BYTES):
        yield data[start : start + _PIECE_BYTES]
