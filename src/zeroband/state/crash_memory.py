"""Recovery of the outer state from the node's shared memory after a crash of the trainer.

A launcher restarts the ranks of a node when one crashes; the buffers in /dev/shm survive. A stamp names their round,
and its digest proves it. While a round is applied, the stamp is still the previous round's: after a crash before the
first write the state is intact, and after it the digest differs. Local rank 0.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from zeroband.observe.log import get_logger
from zeroband.state.digest import has_digest
from zeroband.state.round_state import RoundState

STAMP = "stamp.json"
_HELD = "held-"

_log = get_logger(__name__)


@dataclass(frozen=True)
class MemoryStamp:
    """Description of the section buffers' content."""

    launcher: str
    """Launcher of the writing trainer: memory of another launcher is refused."""
    layout: str
    """Digest of the parameters' names and shapes."""
    sections: tuple[str, ...]
    round: int
    record: Mapping[str, Any]
    """Record of the round's verdict."""
    state_digest: str
    """Digest of the sections, in their order."""


class NodeMemory:
    """Stamps the buffers of a folder, and recovers those of the previous trainer.

    `launcher`: identity of this node's launcher; empty if it restarts nothing: then nothing is stamped. `is_restart`:
    this trainer replaces one that crashed.
    """

    def __init__(self, folder: Path, *, launcher: str, layout: str, is_restart: bool = False) -> None:
        self._folder = folder
        self._launcher = launcher
        self._layout = layout
        self._missing = "the previous trainer left none" if is_restart and launcher else ""

    def stamp(self, sections: tuple[str, ...], round: int, record: Mapping[str, Any], state: str) -> None:
        """Stamp the buffers with the round whose state they hold."""
        if self._launcher:
            stamp = MemoryStamp(self._launcher, self._layout, sections, round, record, state)
            fresh = self._folder / f".{STAMP}"
            fresh.write_text(json.dumps(asdict(stamp)), encoding="utf-8")
            fresh.replace(self._folder / STAMP)

    def set_aside(self, folder: Path) -> tuple[str, ...]:
        """Rename the previous trainer's buffers if they are this launcher's; returns the names of files to keep.

        Removes the stamp first: a state that makes the trainer crash is tried only once.
        """
        stamp = _read(folder / STAMP) if self._launcher else None
        (folder / STAMP).unlink(missing_ok=True)
        if stamp is None:
            return ()
        if (stamp.launcher, stamp.layout) != (self._launcher, self._layout):
            self._missing = "it is that of another launcher or model"
            return ()
        names = [f"{_HELD}{section}.f32" for section in stamp.sections]
        try:
            for section, name in zip(stamp.sections, names, strict=True):
                (folder / f"{section}.f32").replace(folder / name)
            (folder / f"{_HELD}{STAMP}").write_text(json.dumps(asdict(stamp)), encoding="utf-8")
        except OSError as error:
            self._missing = f"it cannot be set aside: {error}"
            return ()
        return (*names, f"{_HELD}{STAMP}")

    def recall(self, numel: int) -> RoundState | None:
        """Return the state that was set aside; None, with a logged reason, if its digest is wrong."""
        stamp = _read(self._folder / f"{_HELD}{STAMP}")
        if stamp is None:
            if self._missing:
                _refuse(why=self._missing)
            return None
        files = {section: self._folder / f"{_HELD}{section}.f32" for section in stamp.sections}
        if any(file.stat().st_size != 4 * numel for file in files.values()):
            why = "its buffers have another length"
        else:
            sections = {n: torch.from_file(str(f), shared=True, size=numel) for n, f in files.items()}
            if has_digest(stamp.state_digest, *sections.values()):
                return RoundState(stamp.round, stamp.record, stamp.state_digest, sections)
            why = f"it was being changed when the trainer died: it no longer has the digest {stamp.state_digest}"
        _refuse(round=stamp.round, why=why)
        return None

    def drop_set_aside(self) -> None:
        """Free the memory of the state that was set aside."""
        for file in self._folder.glob(f"{_HELD}*"):
            file.unlink(missing_ok=True)


def _refuse(**fields: object) -> None:
    _log.warning("cannot use the state in this node's memory", extra={"fields": fields})


def _read(path: Path) -> MemoryStamp | None:
    with contextlib.suppress(OSError, ValueError):
        return TypeAdapter(MemoryStamp).validate_json(path.read_bytes(), strict=True)
    return None
