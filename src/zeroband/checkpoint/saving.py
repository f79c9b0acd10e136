"""Saving one checkpoint: this node's share of the files, then, on one of the members, the commit. In the writer.

Members write in parallel: each its share of the outer state and its own state, then a record of sizes and hashes. The
first member waits for the others' records, writes the shares of lost members, then the manifest; renaming the folder
commits. On storages without renames the manifest commits, since an object appears whole or not at all. Then it updates
`latest` and cleans up.

All members have the same outer state, so any of them can commit. Each member waits until the checkpoint is committed,
and commits if those before it are unavailable: by their own report, since the run lost them, or after a long silence. A
member with a failing storage reports that at once, and the others commit without its own state. Two members may commit
at the same time: their files are identical, and each checks before it replaces a committed one.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, TypeVar

from pydantic import TypeAdapter

from zeroband.checkpoint.layout import (
    LATEST,
    MANIFEST,
    OWNER,
    PARTS,
    TEMPORARY,
    OuterFile,
    OuterPlan,
    folder_of,
    inner_header,
)
from zeroband.checkpoint.loading import open_checkpoint
from zeroband.checkpoint.manifest import (
    ANYBODY,
    PIECE_BYTES,
    CheckpointKey,
    FileHash,
    Manifest,
    Stamp,
    StoredFile,
    Trust,
)
from zeroband.checkpoint.ownership import Owner, clean_up, reclaim, remove_checkpoint
from zeroband.checkpoint.peers import Peers, Shares, WriterLine
from zeroband.checkpoint.storage import Data, Storage, is_lasting, reason_of
from zeroband.errors import CheckpointDamaged, CheckpointFailed
from zeroband.node.backoff import Backoff
from zeroband.state.slot import Slot

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
"""Named points of a save, in order, at which tests kill the writer."""

_LONGEST_PAUSE_S = 30.0
"""Longest pause between attempts at a file."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.05, 1.0
"""Pauses between checks for the other members' records."""
_FILES_AT_ONCE = 2
_HEALS_S = 3.0
"""The others do not wait for a storage that fails for longer."""

_NO_FILES: Mapping[str, memoryview] = {}

T = TypeVar("T")


@dataclass(frozen=True)
class SaveRules:
    """The configuration of saves."""

    keep_last: int
    keep_every: int | None
    peer_wait_s: float
    """Longest silence of a member before the committing one writes its share; the next member waits twice as long."""
    retry_s: float
    """Longest time to retry one file."""


@dataclass(frozen=True)
class SaveOrder:
    """Order to write one checkpoint; JSON."""

    stamp: Stamp
    members: tuple[str, ...]
    """Node ids that share the work."""
    node_state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_left_out: bool = False
    """This node skips the checkpoint: nothing is staged, and the others need not wait for it."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Paths in shared memory of this node's other files, by name; they stay until the save is over."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> SaveOrder:
        return TypeAdapter(SaveOrder).validate_json(text)


@dataclass(frozen=True)
class SaveContext:
    """Common data of one writer's saves."""

    storage: Storage
    node_id: str
    rules: SaveRules
    line: WriterLine
    slots: Sequence[Slot]
    plan: OuterPlan
    outer: Mapping[str, memoryview]
    """Staged float32 buffers of the outer state as bytes, by section; constant during a save."""
    inner: Mapping[str, memoryview] = field(default_factory=dict[str, memoryview])
    """Those of the node's inner optimizer; empty if the outer state has them."""
    key: CheckpointKey | None = None
    """Key derived from the run's token, if any."""
    trust: Trust = ANYBODY
    """Authenticates this run's checkpoints."""


class Save:
    """One checkpoint as this node writes it. `files`: contents of the order's files, by name."""

    def __init__(self, context: SaveContext, order: SaveOrder, files: Mapping[str, memoryview] = _NO_FILES) -> None:
        self._context, self._order, self._own_files = context, order, files
        self._storage, self._stamp, self._node_id = context.storage, order.stamp, context.node_id
        self._plan, self._rules, self._line = context.plan, context.rules, context.line
        self._final = folder_of(self._stamp.inner_step)
        self._folder = f"{self._final}{TEMPORARY}" if self._storage.renames else self._final
        self._files: dict[str, StoredFile] = {}
        self._shares = Shares(self._storage, self._folder, self._stamp.attempt, self._plan.paths, context.key)
        self._peers = Peers(self._shares, self._line, self._node_id, order.members, self._rules.peer_wait_s)
        self._is_published = False
        """Whether others may use this node's files."""
        self._failing: set[str] = set()
        """Files whose writes fail at the moment."""

    def run(self) -> bool:
        """Write, and commit in turn. Returns whether it is committed; reports failures instead of raising."""
        failure = None
        try:
            self._run()
        except CheckpointFailed as error:
            failure = str(error)
        manifest = self._committed()  # another member may have committed it with our files
        stands = manifest is not None and manifest.stamp.attempt == self._stamp.attempt
        if failure is not None and not stands:
            self._give_up(failure)
            return False
        if manifest is not None and stands and self._node_id not in manifest.nodes:
            reason = failure or manifest.missing.get(self._node_id, "the others did not wait for it")
            self._line.tell("checkpoint_left_out", **self._place(), reason=reason)
        return True

    def _run(self) -> None:
        from_s = self._line.now_s()
        self._line.at("staged")
        self._keep_folder()
        if self._is_done():
            return
        self._write_share(self._plan.share(self._order.members)[self._node_id], with_indices=not self._peers.ahead)
        self._write_node()
        self._line.at("share_written")
        self._publish()
        self._line.at("published")
        if self._peers.ahead:
            stored = sum(file.size for file in self._files.values())
            self._line.tell("checkpoint_share_written", **self._place(), bytes=stored, took_s=self._since(from_s))
        written_at_s = self._line.now_s()
        if not self._await_turn(written_at_s):
            return
        self._commit(self._gather(written_at_s))
        total = sum(file.size for file in self._files.values())
        self._line.tell("checkpoint_committed", **self._place(), bytes=total, took_s=self._since(from_s))
        self._tidy()

    def _keep_folder(self) -> None:
        """Make sure that the folder is still this run's; recreate it if it was removed."""
        owner = Owner(self._stamp.run_id, self._stamp.session, self._stamp.layout)
        if self._retry(OWNER, partial(reclaim, self._storage, owner)):
            self._line.tell("checkpoints_lost", folder=self._storage.url)

    def _place(self) -> dict[str, Any]:
        return {"round": self._stamp.round, "step": self._stamp.inner_step}

    def _since(self, from_s: float) -> float:
        return round(self._line.now_s() - from_s, 3)

    def _committed(self) -> Manifest | None:
        """Return the committed save of this step, if readable."""
        try:
            return open_checkpoint(self._storage, self._stamp.inner_step, trust=self._context.trust).manifest
        except CheckpointDamaged:
            return None

    def _is_committed(self) -> bool:
        """Whether this save is committed, by any member."""
        found = self._committed()
        return found is not None and found.stamp.attempt == self._stamp.attempt

    def _is_done(self) -> bool:
        """Whether this save is committed; without renames, another save in its place is removed first."""
        if self._is_committed():
            return True
        if not self._storage.renames:  # its files are overwritten in place, so it must stop counting first
            self._retry(MANIFEST, lambda: self._storage.remove(f"{self._final}/{MANIFEST}"))
        return False

    def _write_share(self, files: Sequence[OuterFile], *, with_indices: bool) -> None:
        for path, data in self._plan.indices.items() if with_indices else ():
            self._write(path, lambda data=data: iter((data,)))
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="checkpoint-write") as pool:
            for done in [pool.submit(self._write, file.path, partial(self._pieces, file)) for file in files]:
                done.result()

    def _pieces(self, file: OuterFile) -> Iterator[Data]:
        yield file.header()
        for piece in _cut(self._context.outer[file.section][4 * file.start : 4 * file.stop]):
            yield piece
            self._line.at("mid_write")

    def _inner_pieces(self) -> Iterator[Data]:
        yield inner_header(self._context.slots, tuple(self._context.inner))
        for buffer in self._context.inner.values():
            yield from _cut(buffer)

    def _write_node(self) -> None:
        folder = f"nodes/{self._node_id}"
        state = json.dumps(self._order.node_state, sort_keys=True).encode()
        self._write(f"{folder}/state.json", lambda: iter((state,)))
        if self._context.inner:
            self._write(f"{folder}/inner.safetensors", self._inner_pieces)
        for name, data in self._own_files.items():
            self._write(f"{folder}/{name}", lambda data=data: _cut(data))

    def _write(self, path: str, pieces: Callable[[], Iterable[Data]]) -> None:
        self._retry(path, lambda: self._store(path, pieces()))

    def _store(self, path: str, pieces: Iterable[Data]) -> None:
        """Write a file of the checkpoint, and record its size and hash."""
        seen, size = FileHash(is_sealed=self._context.key is not None), 0

        def passing() -> Iterator[Data]:
            nonlocal size
            for piece in pieces:
                seen.update(piece)
                yield piece
                size += memoryview(piece).nbytes
                self._line.count(memoryview(piece).nbytes)

        self._storage.write(f"{self._folder}/{path}", passing())
        self._files[path] = seen.of(size)

    def _retry(self, what: str, action: Callable[[], T]) -> T:
        """Retry with growing pauses. Raises CheckpointFailed after the time-out, or once the others have committed."""
        from_s, pauses = self._line.now_s(), Backoff(0.5, _LONGEST_PAUSE_S)
        while True:
            try:
                result = action()
            except OSError as error:
                reason = f"{self._storage.url}/{self._folder}/{what}: {reason_of(error)}"
                failing_s = self._line.now_s() - from_s
                if failing_s + pauses.longest_s > self._rules.retry_s:
                    raise CheckpointFailed(reason) from error
                self._line.tell("checkpoint_retrying", **self._place(), reason=reason)
                if is_lasting(error) or failing_s > _HEALS_S:
                    self._note_failing(what, reason)
            else:
                self._note_working(what)
                return result
            self._pause(pauses.pause_s(), reason)

    def _note_failing(self, what: str, reason: str) -> None:
        self._failing.add(what)
        self._peers.report_unavailable(reason)

    def _note_working(self, what: str) -> None:
        if what in self._failing:
            self._failing.discard(what)
            self._peers.report_unavailable(None)

    def _pause(self, seconds: float, reason: str) -> None:
        """Wait before another attempt. Raises CheckpointFailed once the others have committed without this node."""
        until_s = self._line.now_s() + seconds
        while (left_s := until_s - self._line.now_s()) > 0:
            self._line.sleep(min(left_s, _LONGEST_LOOK_S) if self._failing and self._peers.others else left_s)
            if self._failing and self._peers.others and self._is_committed():
                raise CheckpointFailed(reason)

    # -- between the members -------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        if self._peers.others:
            self._retry(PARTS, lambda: self._shares.publish(self._node_id, self._files))
            self._is_published = True

    def leave_out(self, why: str) -> None:
        """Tell the others not to wait for this node, which does not take part. Any thread; never raises."""
        self._peers.leave_out(why)

    def _await_turn(self, from_s: float) -> bool:
        """Wait until all members before this one are unavailable; returns False once the checkpoint is committed."""
        self._peers.reset_silence(from_s)
        pauses = self._pauses()
        while not self._peers.is_turn():
            if self._is_committed():
                return False
            next(pauses)
        return not self._is_committed()

    def _gather(self, from_s: float) -> dict[str, str]:
        """Collect the others' records, and write the missing shares.

        Returns the members whose own state is missing, and why.
        """
        self._peers.reset_silence(from_s)
        missing, pauses = dict.fromkeys(self._peers.others, ""), self._pauses()
        while True:
            for member in tuple(missing):
                files, missing[member] = self._peers.files_or_reason(member)
                if files:
                    self._files |= files
                    del missing[member]
            if all(missing.values()):
                break
            next(pauses)
        if missing:
            self._line.tell("checkpoint_incomplete", **self._place(), nodes=sorted(missing), why=missing)
        left = [file for file in self._plan.files if file.path not in self._files]
        self._write_share(left, with_indices=not self._plan.indices.keys() <= self._files.keys())
        return missing

    def _pauses(self) -> Iterator[None]:
        """Sleep between checks of the storage: briefly at first."""
        pauses = Backoff(_SHORTEST_LOOK_S, _LONGEST_LOOK_S)
        while True:
            self._line.working(is_waiting=True)
            self._line.sleep(pauses.pause_s())
            yield

    # -- the commit ----------------------------------------------------------------------------------------------------

    def _commit(self, missing: Mapping[str, str]) -> None:
        self._require_stored(self._folder)
        self._keep_folder()
        self._line.at("before_manifest")
        manifest, key = Manifest(self._stamp, self._files, missing), self._context.key
        data = (manifest if key is None else key.sign(manifest)).to_json()
        self._retry(MANIFEST, lambda: self._storage.write(f"{self._folder}/{MANIFEST}", (data,)))
        self._line.at("before_rename")
        is_ours = not self._storage.renames or self._retry(self._final, self._rename)
        self._line.at("renamed")
        if is_ours:
            self._require_whole()
        self._retry(LATEST, lambda: self._storage.write(LATEST, (f"{self._final}\n".encode(),)))
        self._line.at("latest")

    def _require_stored(self, folder: str) -> None:
        """Compare the storage's listing with what was written."""
        found = self._retry("its files", lambda: self._storage.sizes(folder))
        for path, file in self._files.items():
            if found.get(path) != file.size:
                raise CheckpointFailed(f"{folder}/{path} was written with {file.size} bytes, has {found.get(path, 0)}")

    def _rename(self) -> bool:
        """Rename the folder to its final name; returns False if another member was faster."""
        if self._final in self._storage.names():
            if self._is_committed():
                return False
            remove_checkpoint(self._storage, self._stamp.inner_step)  # left from before a rollback
        self._storage.rename(self._folder, self._final)
        return True

    def _require_whole(self) -> None:
        """Undo the commit if files have vanished: others cleaned up after a node that was suspended for too long."""
        try:
            self._require_stored(self._final)
        except CheckpointFailed:
            self._retry(self._final, partial(remove_checkpoint, self._storage, self._stamp.inner_step))
            raise

    def _tidy(self) -> None:
        """Clean up; a failure is reported, and retried after the next checkpoint."""
        keep_last, keep_every = self._rules.keep_last, self._rules.keep_every
        step = self._stamp.inner_step
        try:
            self._storage.remove(f"{self._final}/{PARTS}")
            removed = clean_up(self._storage, step, keep_last=keep_last, keep_every=keep_every, at=self._line.at)
        except OSError as error:
            self._line.tell("checkpoint_retrying", **self._place(), reason=f"clean-up: {reason_of(error)}")
            return
        if removed:
            self._line.tell("checkpoints_removed", steps=removed)

    def _give_up(self, reason: str) -> None:
        """Report the reason and free the space of this node's files, or of all files if no member is left to commit."""
        self._line.tell("checkpoint_failed", **self._place(), reason=reason)
        is_last = self._peers.is_last_committer()
        with contextlib.suppress(OSError):
            if is_last and self._storage.renames:
                self._storage.remove(self._folder)
            elif self._storage.renames and not self._is_published:
                for path in self._files:
                    self._storage.remove(f"{self._folder}/{path}")
        if not is_last:
            self.leave_out(reason)


def _cut(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]
