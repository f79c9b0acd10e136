"""The [ckpt] section: where checkpoints go, how often, and which are kept."""

from __future__ import annotations

import difflib
import importlib
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from zeroband.config.section import NODE_LOCAL, Section

_STEPS_BETWEEN = 500
_USUAL = ("s3", "gs", "file")
_ALIKE = 0.5
"""Likeness of two schemes from which on one may be a slip for the other: `s4` and `s3` have it."""


def require_folder_or_url(path: str) -> None:
    """Raise ValueError for what would be taken for a folder with a strange name, or is no storage that we know."""
    scheme, colon, rest = path.partition(":")
    if not colon or "/" in scheme or rest.startswith(":"):  # a folder, or one storage in front of another
        return
    if not rest.startswith("//"):
        raise ValueError(
            f"ckpt.path={path!r} is no URL, which has `://` ({scheme}://...); write /{rest.lstrip('/')} for that "
            f"folder, or ./{path} for one of such a name"
        )
    if scheme == "file" and not rest.startswith("///"):
        raise ValueError(f"ckpt.path={path!r}: a file URL has three slashes: file:///{rest.lstrip('/')}")
    known: Any = importlib.import_module("fsspec.registry")  # has no types
    schemes = {*known.known_implementations, *known.registry}
    if scheme not in schemes:
        nearest = [
            name for name in (*_USUAL, *schemes) if difflib.SequenceMatcher(None, scheme, name).ratio() >= _ALIKE
        ]
        hint = f"did you mean {nearest[0]}://" if nearest else f"usual are {', '.join(f'{name}://' for name in _USUAL)}"
        raise ValueError(f"ckpt.path={path!r}: {scheme}:// is no storage that is known here; {hint}")


class CkptConfig(Section):
    """Checkpoints on disk or in an object store."""

    path: str | None = Field(default=None, min_length=1, json_schema_extra=NODE_LOCAL)
    """Folder or fsspec URL (`s3://BUCKET/...`) for checkpoints, written below `<path>/<run.id>/`. None: none are."""

    @field_validator("path")
    @classmethod
    def _is_folder_or_url(cls, path: str | None) -> str | None:
        if path is not None:
            require_folder_or_url(path)
        return path

    every_rounds: PositiveInt | None = None
    """Rounds between two checkpoints. None: 1, or 500 where a round is one inner step, as with DDP and for a node
    alone. The end of a run is always kept."""
    keep_last: PositiveInt = 3
    """So many of the newest checkpoints stay; older ones are removed when a newer one is complete."""
    keep_every: PositiveInt | None = None
    """Checkpoints of rounds that are a multiple of this stay for ever. None: none do."""
    shared: bool = True
    """All nodes see the same path and write one checkpoint together, each a share of it. False: each node writes a
    whole one to a path of its own."""
    peer_wait_s: PositiveFloat = 60.0
    """Longest silence of a node's writer before the node that completes a checkpoint goes without its share, and writes
    the rest itself. If that one is silent for twice as long, the next node completes it. Nodes that the run lost, and
    nodes whose storage fails, are not waited for."""
    retry_s: PositiveFloat = Field(default=300.0, json_schema_extra=NODE_LOCAL)
    """How long one file is tried again when the storage fails, before the checkpoint is given up."""

    def rounds_between(self, *, are_rounds_steps: bool) -> int:
        """Rounds from one checkpoint to the next; the same on all nodes."""
        return self.every_rounds or (_STEPS_BETWEEN if are_rounds_steps else 1)
