"""Loads a checkpoint: takes the newest that verifies, and logs why others were skipped.

Hashes files while reading them, straight into the flat buffers of the outer state. Any thread; no torch.distributed,
and torch only for reading tensors.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from zeroband.checkpoint.layout import LATEST, MANIFEST, folder_of, hub_name, read_header, step_of
from zeroband.checkpoint.manifest import ANYBODY, PIECE_BYTES, FileHash, Manifest, StoredFile, Trust, parse_manifest
from zeroband.checkpoint.storage import Storage, reason_of
from zeroband.errors import CheckpointDamaged, RecoveryFailed
from zeroband.observe.log import get_logger
from zeroband.state.digest import has_digest
from zeroband.state.slot import Slot, bytes_of

if TYPE_CHECKING:
    from torch import Tensor

_FILES_AT_ONCE = 4
_RETRY_S = (0.2, 1.0, 5.0)

T = TypeVar("T")

_log = get_logger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint. Every read verifies its file, and raises CheckpointDamaged with the file's name."""

    storage: Storage
    manifest: Manifest
    on_piece: Callable[[], object] = lambda: None
    """Called after every few megabytes, in the reading thread."""
    rejected: Mapping[int, str] = field(default_factory=dict[int, str])
    """Steps and reasons of checkpoints that were skipped before it."""

    @property
    def folder(self) -> str:
        return folder_of(self.manifest.stamp.inner_step)

    def require_sizes(self) -> None:
        """Check that every file exists with its size; cheap."""
        found = self.storage.sizes(self.folder)
        for path, file in self.manifest.files.items():
            if found.get(path) != file.size:
                seen = "is missing" if path not in found else f"has {found[path]} bytes"
                raise CheckpointDamaged(f"{self.folder}/{path} {seen}, the manifest says {file.size} bytes")

    def verify(self) -> None:
        """Check the hash of every file."""
        self.require_sizes()
        for path, file in self.manifest.files.items():
            self._reading(path, partial(self._hash, path, file))

    def read_outer(self, slots: Sequence[Slot], buffers: Mapping[str, Tensor]) -> None:
        """Fill the flat buffers of the sections, each (n,) float32 on CPU with the layout `slots`."""
        stamp = self.manifest.stamp
        if set(buffers) != set(stamp.sections):
            raise CheckpointDamaged(
                f"{self.folder} holds the outer state of another algorithm or inner optimizer: "
                f"{', '.join(stamp.sections)}; needed: {', '.join(buffers)}"
            )
        self._read_sections(slots, buffers)

    def read_parameters(self, slots: Sequence[Slot], buffer: Tensor) -> None:
        """Fill a flat buffer, (n,) float32 on CPU, with the parameters, for any outer algorithm."""
        self._read_sections(slots, {self.manifest.stamp.sections[0]: buffer})

    def _read_sections(self, slots: Sequence[Slot], buffers: Mapping[str, Tensor]) -> None:
        sections = self.manifest.stamp.sections
        targets = {hub_name(slot.name): slot for slot in slots}
        work: list[Callable[[], set[tuple[str, str]]]] = []
        for path, file in self.manifest.files.items():
            if path.startswith("outer/"):
                section = _section_of(path, sections)
                if section not in buffers:
                    continue
                read = partial(self._read_tensors, path, file, targets, section, buffers[section])
                if not path.endswith(".safetensors"):
                    read = partial(self._hash, path, file)
                work.append(partial(self._reading, path, read))
        with ThreadPoolExecutor(_FILES_AT_ONCE, thread_name_prefix="checkpoint-read") as pool:
            done = [pool.submit(read) for read in work]
            found = set[tuple[str, str]]().union(*(reading.result() for reading in done))
        missing = sorted({(section, name) for section in buffers for name in targets} - found)
        if missing:
            section, name = missing[0]
            raise CheckpointDamaged(f"{self.folder}/outer lacks {len(missing)} tensors, {name} of {section} first")

    def _read_tensors(
        self, path: str, file: StoredFile, targets: Mapping[str, Slot], section: str, buffer: Tensor
    ) -> set[tuple[str, str]]:
        """Fill a section's buffer from one file; returns its (section, tensor) pairs."""
        seen, found = FileHash.like(file), set[tuple[str, str]]()
        with self.storage.open(f"{self.folder}/{path}") as opened:
            spans: list[tuple[int, int]] = []
            for tensor in read_header(opened, file.size, seen):
                slot = targets.get(tensor.name)
                if slot is None or tuple(slot.shape) != tensor.shape:
                    raise CheckpointDamaged(f"its tensor {tensor.name} {list(tensor.shape)} is not one of this model")
                found.add((section, tensor.name))
                spans.append((slot.start, slot.start + slot.numel))
            for start, stop in _join(spans):
                seen.read(opened, bytes_of(buffer[start:stop]), self.on_piece)
        seen.require(file)
        return found

    def node_state(self, node_id: str) -> dict[str, Any] | None:
        """Return a node's counters and random states; None if it is not in this checkpoint."""
        data = self.read_file(node_id, "state.json")
        return None if data is None else cast("dict[str, Any]", json.loads(data))

    def read_inner(self, node_id: str, tensors: Mapping[str, Tensor]) -> bool:
        """Load a node's inner optimizer: `buffer.parameter` by name, each rank its own rows of those that are sharded.

        Returns whether the node is in this checkpoint.
        """
        path = f"nodes/{node_id}/inner.safetensors"
        if path not in self.manifest.files:
            return False
        # the writer verifies with this module, and has no torch
        from zeroband.checkpoint.own_state import load_inner

        opened = partial(self.storage.open, f"{self.folder}/{path}")
        self._reading(path, partial(load_inner, tensors, opened, self.manifest.files[path], self.on_piece))
        return True

    def read_file(self, node_id: str, name: str) -> bytes | None:
        """Return another file of a node by name, if it saved one."""
        path = f"nodes/{node_id}/{name}"
        if path not in self.manifest.files:
            return None
        return self._reading(path, partial(self._read_whole, path, self.manifest.files[path]))

    def _read_whole(self, path: str, file: StoredFile) -> bytes:
        data = self.storage.read(f"{self.folder}/{path}")
        seen = FileHash.like(file)
        seen.update(data)
        seen.require(file)
        return data

    def _hash(self, path: str, file: StoredFile) -> set[tuple[str, str]]:
        """Check the hash of a file without tensors."""
        seen, buffer = FileHash.like(file), memoryview(bytearray(min(PIECE_BYTES, file.size)))
        with self.storage.open(f"{self.folder}/{path}") as opened:
            for start in range(0, file.size, PIECE_BYTES):
                seen.read(opened, buffer[: file.size - start], self.on_piece)
            if opened.read(1):
                raise CheckpointDamaged(f"it has more than {file.size} bytes")
        seen.require(file)
        return set()

    def _reading(self, path: str, read: Callable[[], T]) -> T:
        """Read a file, with retries for transient errors; names it in errors."""
        for pause_s in (*_RETRY_S, None):
            try:
                return read()
            except FileNotFoundError as error:
                raise CheckpointDamaged(f"{self.folder}/{path} is missing") from error
            except (CheckpointDamaged, EOFError) as error:
                raise CheckpointDamaged(f"{self.folder}/{path}: {error}") from error
            except OSError as error:
                if pause_s is None:
                    raise CheckpointDamaged(f"{self.folder}/{path}: {reason_of(error)}") from error
                time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")


def _section_of(path: str, sections: Sequence[str]) -> str:
    """Return the section of a file of the outer state."""
    name = path.removeprefix("outer/")
    stems = {section: "model" if section == sections[0] else section for section in sections}
    for section, stem in stems.items():
        if name.startswith((f"{stem}.safetensors", f"{stem}-")):
            return section
    raise CheckpointDamaged(f"{path} belongs to none of {', '.join(sections)}")


def _join(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge neighbours into one read."""
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def open_checkpoint(
    storage: Storage, step: int, on_piece: Callable[[], object] = lambda: None, *, trust: Trust = ANYBODY
) -> Checkpoint:
    """Open a committed checkpoint by step. Raises CheckpointDamaged, also for an unfinished or untrusted one."""
    path = f"{folder_of(step)}/{MANIFEST}"
    try:
        manifest = parse_manifest(storage.read(path))
        trust.require(manifest)
    except FileNotFoundError as error:
        raise CheckpointDamaged(f"{path} is missing: the save never finished") from error
    except (CheckpointDamaged, OSError) as error:
        why = str(error) if not isinstance(error, OSError) else reason_of(error)
        raise CheckpointDamaged(f"{path}: {why}") from error
    if manifest.stamp.inner_step != step:
        raise CheckpointDamaged(f"{path} is of step {manifest.stamp.inner_step}")
    return Checkpoint(storage, manifest, on_piece)


def steps_in_order(storage: Storage) -> list[int]:
    """Return the steps that look like checkpoints, in the order in which to try them.

    First that of `latest`, then older ones, newest first. Newer ones come last: the run crashed right after committing
    them, or rolled back from them.
    """
    steps = sorted((step for name in storage.names() if (step := step_of(name)) is not None), reverse=True)
    try:
        latest = step_of(storage.read(LATEST).decode().strip())
    except (FileNotFoundError, UnicodeDecodeError):
        latest = None
    if latest is None:
        return steps
    return [step for step in steps if step <= latest] + [step for step in reversed(steps) if step > latest]


def restore(
    storage: Storage,
    slots: Sequence[Slot],
    buffers: Mapping[str, Tensor],
    *,
    step: int | None = None,
    on_piece: Callable[[], object] = lambda: None,
    trust: Trust = ANYBODY,
) -> Checkpoint | None:
    """Read the newest checkpoint that verifies, or that of a step, into the flat buffers of the outer state.

    Verifies the outer state by the hash of each file and by its digest, and the sizes of all other files. Returns None
    without any checkpoint. Raises RecoveryFailed if none verifies: the buffers are then invalid, and the user must
    decide whether to start a new run.
    """
    try:
        steps = [step] if step is not None else steps_in_order(storage)
    except OSError as error:
        raise RecoveryFailed(f"cannot look for checkpoints in {storage.url}: {reason_of(error)}") from error
    rejected = dict[int, str]()
    for candidate in steps:
        try:
            checkpoint = open_checkpoint(storage, candidate, on_piece, trust=trust)
            checkpoint.require_sizes()
            checkpoint.read_outer(slots, buffers)
            _require_digest(checkpoint, buffers)
        except CheckpointDamaged as error:
            rejected[candidate] = str(error)
            _log.error("checkpoint skipped", extra={"fields": {"step": candidate, "why": str(error)}})
            continue
        if (remark := trust.remark(checkpoint.manifest)) is not None:
            _log.warning("this checkpoint is not authenticated", extra={"fields": {"step": candidate, "why": remark}})
        return replace(checkpoint, rejected=rejected)
    if not rejected:
        return None
    reasons = "; ".join(rejected.values())
    there = f"; there are steps {sorted(steps_in_order(storage))}" if step is not None else ""
    raise RecoveryFailed(f"no checkpoint in {storage.url} is usable: {reasons}{there}")


def _require_digest(checkpoint: Checkpoint, buffers: Mapping[str, Tensor]) -> None:
    stamp = checkpoint.manifest.stamp
    if stamp.state_digest and not has_digest(stamp.state_digest, *(buffers[section] for section in stamp.sections)):
        raise CheckpointDamaged(f"{checkpoint.folder}/outer no longer has the digest {stamp.state_digest}")
