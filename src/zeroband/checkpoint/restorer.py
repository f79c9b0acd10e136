"""Restores a state from a checkpoint, for a restart or a rollback. Knows no other node."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zeroband.checkpoint.layout import LATEST, folder_of, step_of
from zeroband.checkpoint.loading import Checkpoint, open_checkpoint, restore, steps_in_order
from zeroband.checkpoint.manifest import ANYBODY, Stamp, Trust
from zeroband.checkpoint.own_state import OWN_FILE, OwnState, set_random_state, views_of
from zeroband.checkpoint.storage import Storage, open_storage, reason_of
from zeroband.config.schema import ResumeConfig, RunConfig
from zeroband.data.tokens import Corpus
from zeroband.elastic.membership.resume_rules import Held, Holding
from zeroband.errors import CheckpointDamaged, ConfigError, RecoveryFailed
from zeroband.model.blueprint import FIRST
from zeroband.node.faults import FaultPoints
from zeroband.node.mesh import LocalMesh
from zeroband.observe.log import get_logger
from zeroband.state.flat import FlatLayout
from zeroband.state.round_state import RoundState

_log = get_logger(__name__)


@dataclass(frozen=True)
class ResumeSource:
    """The sources of `--resume`."""

    own: Storage
    """This run's checkpoints."""
    other: Storage | None = None
    """Another run's checkpoints, to start from while this run has none."""
    step: int | None = None
    """Requested step; None: the newest that verifies."""
    trust: Trust = ANYBODY


@dataclass(frozen=True, kw_only=True)
class SavedState(RoundState):
    """The verified outer state of a checkpoint."""

    step: int
    rejected: tuple[str, ...] = ()
    """Reasons for skipping newer checkpoints."""


def source_of(path: str | None, run_id: str, node_id: str, *, other: str | None, step: int | None) -> ResumeSource:
    """Return the sources of checkpoints. Raises ConfigError.

    `path`: ckpt.path; `other`: resume.path, a run's checkpoints or one of them.
    """
    if path is None:
        raise ConfigError("--resume needs ckpt.path: the folder or URL below which this run keeps its checkpoints")
    if other is None:
        return ResumeSource(open_storage(path, run_id, node_id), step=step)
    place, _, last = other.rstrip("/").rpartition("/")
    named = step_of(last)
    if named is not None:
        place, _, last = place.rpartition("/")
        if step is not None and step != named:
            raise ConfigError(f"resume.path={other!r} names step {named}, resume.step={step} another one")
    if not last or re.fullmatch(r"[A-Za-z0-9._-]+", last) is None:
        raise ConfigError(f"resume.path={other!r} is not <ckpt.path>/<run.id>, nor a step_N folder in it")
    return ResumeSource(open_storage(path, run_id, node_id), open_storage(place or ".", last, node_id), named or step)


def source_for(config: RunConfig, node_id: str) -> ResumeSource:
    """Return the sources of a configuration. Raises ConfigError."""
    resume, token = config.resume or ResumeConfig(), config.run.token
    source = source_of(config.ckpt.path, config.run.id, node_id, other=resume.path, step=resume.step)
    trust = Trust(None if token is None else token.get_secret_value(), accepts_any=resume.trust)
    return replace(source, trust=trust)


class Restorer:
    """Reads checkpoints into this node.

    `on_piece`: called after every few megabytes, in any thread. `shared`: values that nodes agree on; a checkpoint may
    have the hash of one. `data`: record of this run's data. `targets` of all methods: the sections of the outer state,
    (n,) float32 each, on CPU.
    """

    def __init__(
        self,
        source: ResumeSource,
        node_id: str,
        layout: FlatLayout,
        faults: FaultPoints,
        on_piece: Callable[[], object] = lambda: None,
        shared: Mapping[str, str] | None = None,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        self._source = source
        self._data = data
        self._shared = shared or {}
        self._node_id = node_id
        self._layout = layout
        self._faults = faults
        self._on_piece = on_piece
        self._storage = source.own
        """Source of the last checkpoint that was read."""
        self.skipped_steps: Mapping[int, str] = {}
        """Steps and reasons of checkpoints that `holding` skipped although they come first."""
        self.staged: Mapping[str, Tensor] | None = None
        """Result of `stage`, (n,) float32 each."""

    @property
    def url(self) -> str:
        """URL of this run's checkpoints."""
        return self._source.own.url

    def steps(self) -> list[int]:
        """Return the steps of this run's checkpoints that look committed. Raises RecoveryFailed."""
        try:
            return steps_in_order(self._source.own)
        except OSError as error:
            raise RecoveryFailed(f"cannot read {self._source.own.url}: {reason_of(error)}") from error

    def holding(self, step: int | None = None, rejected: Mapping[int, str] | None = None) -> Holding:
        """Report the checkpoint of this step, or the configured one, without reading its content.

        `rejected`: steps and reasons of checkpoints that failed to load.
        """
        passed = self.skipped_steps = dict(rejected or {})
        ordered, other = self._source.step, self._source.other
        told, wanted = Holding(ordered=ordered), ordered if step is None else step
        try:
            storage = self._place()
            steps = steps_in_order(storage)
        except RecoveryFailed as error:
            return replace(told, problem=str(error))
        except OSError as error:
            return replace(told, problem=f"cannot read {self.url}: {reason_of(error)}")
        for candidate in [step for step in steps if wanted in (None, step) and step not in passed]:
            try:
                checkpoint = open_checkpoint(storage, candidate, trust=self._source.trust)
                checkpoint.require_sizes()
            except (CheckpointDamaged, OSError) as error:
                passed[candidate] = str(error) if isinstance(error, CheckpointDamaged) else reason_of(error)
                continue
            return replace(told, held=_held(checkpoint.manifest.stamp, is_own=storage is self._source.own))
        if not steps:
            return replace(told, problem=f"there is no checkpoint in {storage.url}" if storage is other else "")
        there = f"; there are steps {sorted(steps)}" if wanted is not None else ""
        why = "; ".join(passed.values()) or "it is not there"
        return replace(told, problem=f"{why} in {storage.url}{there}")

    def _place(self) -> Storage:
        """Return the source: this run's own, unless resume.path names a step or this run has no checkpoint."""
        other = self._source.other
        return other if other is not None and (self._source.step is not None or not self.steps()) else self._source.own

    def newest(self) -> Stamp | None:
        """Return the stamp of this run's newest readable checkpoint."""
        try:
            for step in steps_in_order(self._source.own)[:1]:
                return open_checkpoint(self._source.own, step, trust=self._source.trust).manifest.stamp
        except (CheckpointDamaged, OSError) as error:
            _log.warning("no usable checkpoint to join from", extra={"fields": {"error": str(error)}})
        return None

    def is_whole(self, step: int) -> bool:
        """Whether a checkpoint of this run has all its files in full length. Raises RecoveryFailed."""
        try:
            open_checkpoint(self._source.own, step, trust=self._source.trust).require_sizes()
        except CheckpointDamaged:
            return False
        except OSError as error:
            raise RecoveryFailed(f"cannot read {self._source.own.url}: {reason_of(error)}") from error
        return True

    def read(self, step: int, targets: Mapping[str, Tensor]) -> SavedState:
        """Read and verify a checkpoint of this run. Raises RecoveryFailed."""
        saved = self._read(self._source.own, targets, step)
        assert saved is not None, "of a step there is one, or an error"
        return saved

    def restore(self, targets: Mapping[str, Tensor], step: int | None = None) -> SavedState | None:
        """Read and verify the checkpoint of this step, or the configured one.

        Returns None without any checkpoint. Raises RecoveryFailed, and ConfigError if the requested one is missing.
        """
        source, wanted = self._source, step if step is not None else self._source.step
        place = self._place()
        self._faults.at("restoring", 0)
        saved = self._read(place, targets, wanted)
        self._faults.at("restored", 0)
        if step is None:
            self.warn_of_newer()
        if saved is None and (source.other is not None or wanted is not None):
            raise ConfigError(f"there is no checkpoint in {place.url}")
        return saved

    def _read(self, storage: Storage, targets: Mapping[str, Tensor], step: int | None) -> SavedState | None:
        self._storage, trust = storage, self._source.trust
        found = restore(storage, self._layout.slots, targets, step=step, on_piece=self._on_piece, trust=trust)
        if found is None:
            return None
        self._require_same_base(found)
        self._warn_of_other_samples(found)
        stamp, rejected = found.manifest.stamp, tuple(found.rejected.values())
        return SavedState(stamp.round, stamp.record, stamp.state_digest, step=stamp.inner_step, rejected=rejected)

    def _require_same_base(self, checkpoint: Checkpoint) -> None:
        """Raise ConfigError if frozen parameters differ: no checkpoint contains them."""
        saved = checkpoint.manifest.stamp.model.get(FIRST, {}).get("digests", {})
        for key, digest in saved.items():
            if self._shared.get(key, digest) != digest:
                raise ConfigError(
                    f"{key} differ from those of the checkpoint in {checkpoint.folder}: the base of its adapters is "
                    "another one now; set model.name to that which it was trained with"
                )

    def _warn_of_other_samples(self, checkpoint: Checkpoint) -> None:
        """Warn if the checkpoint's sample numbers refer to other data than this run's."""
        saved, ours = checkpoint.manifest.stamp.data, self._data
        if not (saved and ours):
            return
        try:
            before, now = Corpus.of_record(saved).order, Corpus.of_record(ours).order
        except ValueError:  # saved by another version with other keys
            return
        if changed := {key: f"{before[key]} -> {now[key]}" for key in now if before[key] != now[key]}:
            _log.warning(
                "samples are others than when the checkpoint was taken: some may come again, some never, and what was "
                "held out may be trained",
                extra={"fields": changed},
            )

    def warn_of_newer(self) -> None:
        """Warn about newer checkpoints that an explicit step skips, at every start with it."""
        named = self._source.step
        newer = [] if named is None else [step for step in self.steps() if step > named]
        if newer:
            fields = {"step": named, "newer": len(newer), "newest": max(newer)}
            _log.warning("skipping newer checkpoints, since a step is named", extra={"fields": fields})

    def stage(self, step: int, sections: Sequence[str]) -> SavedState:
        """Read a checkpoint of this run into separate memory. Raises RecoveryFailed. Local rank 0."""
        self._faults.at("restoring", 0)
        targets = {name: torch.empty(self._layout.numel) for name in sections}
        saved = self.read(step, targets)
        self.staged = targets
        self._faults.at("restored", 0)
        return saved

    def load_inner(
        self, step: int, inner: OwnState, local: LocalMesh, buffers: Mapping[str, Tensor] | None = None
    ) -> bool:
        """Load this node's inner optimizer from the checkpoint that was read; every local rank its shards.

        `buffers`: (n,) float32, to fill with the node's other saved buffers. Returns False, with fresh moments, if the
        checkpoint lacks this node or its state does not verify.
        """
        wanted = {**inner.named_moments(), **views_of(self._layout.slots, buffers or {})}
        try:
            checkpoint = open_checkpoint(self._storage, step, self._on_piece, trust=self._source.trust)
            counters = checkpoint.node_state(self._node_id)
            saved = None if counters is None else counters.get("moments")
            if saved is not None and tuple(saved) != inner.moment_names:
                fields = {"step": step, "saved": saved, "needed": inner.moment_names}
                _log.warning("fresh moments: those saved are of another inner optimizer", extra={"fields": fields})
                counters = None
            if counters is not None and (not wanted or checkpoint.read_inner(self._node_id, wanted)):
                packed = checkpoint.read_file(self._node_id, OWN_FILE.format(rank=local.rank))
                if inner.restore(counters, packed):
                    set_random_state(counters["random_states"], local)
                    return True
        except CheckpointDamaged as error:
            _log.error("fresh moments: its own are damaged", extra={"fields": {"step": step, "why": str(error)}})
        inner.forget_moments()
        return False

    def pop_staged(self) -> Mapping[str, Tensor]:
        """Return the result of `stage`, and forget it. Local rank 0."""
        staged, self.staged = self.staged, None
        assert staged is not None, "stage comes first"
        return staged

    def point_latest(self, step: int) -> None:
        """Point `latest` at the step of a rollback, so that a later restart begins there. Local rank 0."""
        try:
            self._source.own.write(LATEST, (f"{folder_of(step)}\n".encode(),))
        except OSError as error:
            _log.warning("`latest` still names an abandoned checkpoint", extra={"fields": {"why": reason_of(error)}})


def _held(stamp: Stamp, *, is_own: bool) -> Held:
    progress = stamp.record.get("progress", {})
    line, (after, _) = progress.get("founding", ""), progress.get("follows") or ("", 0)
    return Held(stamp.inner_step, stamp.round, stamp.state_digest, line, after, is_own)
