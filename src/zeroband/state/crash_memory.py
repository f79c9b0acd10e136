"""The outer state in the node's shared memory as a restarted trainer finds it: stamped, checked, set aside.

torchrun restarts the ranks of a node when one of them crashes; the buffers of the dead ones are still there. A stamp
says of which round they are; the digest proves it. While a round is applied the stamp is still that of the round
before: a trainer that dies until the first write has lost nothing, and after it the digest differs. Local rank 0 alone.
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
from zeroband.state.flat import digest_of
from zeroband.state.round_state import RoundState

STAMP = "stamp.json"
_HELD = "held-"

_log = get_logger(__name__)


@dataclass(frozen=True)
class MemoryStamp:
    """What lies in the section buffers."""

    launcher: str
    """Launcher of the trainer that wrote it: another launcher's memory is not taken."""
    layout: str
    """Digest of the parameters' names and shapes."""
    sections: tuple[str, ...]
    round: int
    record: Mapping[str, Any]
    """Record of the round's verdict."""
    state_digest: str
    """Digest of the sections, in their order."""


class NodeMemory:
    """Stamps the buffers of a folder, and takes over what the trainer before left there.

    `launcher`: tells this node's launcher from every other one; empty: the trainer would not be restarted, so there is
    nothing to stamp. `is_restart`: it started this trainer in the place of one that crashed.
    """

    def __init__(self, folder: Path, *, launcher: str, layout: str, is_restart: bool = False) -> None:
        self._folder = folder
        self._launcher = launcher
        self._layout = layout
        self._lacks = "the trainer before left none" if is_restart and launcher else ""

    def stamp(self, sections: tuple[str, ...], round: int, record: Mapping[str, Any], state: str) -> None:
        """The buffers hold the state of this round."""
        if self._launcher:
            stamp = MemoryStamp(self._launcher, self._layout, sections, round, record, state)
            fresh = self._folder / f".{STAMP}"
            fresh.write_text(json.dumps(asdict(stamp)), encoding="utf-8")
            fresh.replace(self._folder / STAMP)

    def set_aside(self, folder: Path) -> tuple[str, ...]:
        """Keep what the trainer before left in the folder, if it is this launcher's; names of the files to keep.

        The stamp goes first, so that a memory which makes the trainer crash is taken once.
        """
        stamp = _read(folder / STAMP) if self._launcher else None
        (folder / STAMP).unlink(missing_ok=True)
        if stamp is None:
            return ()
        if (stamp.launcher, stamp.layout) != (self._launcher, self._layout):
            self._lacks = "it is that of another launcher or model"
            return ()
        names = [f"{_HELD}{section}.f32" for section in stamp.sections]
        try:
            for section, name in zip(stamp.sections, names, strict=True):
                (folder / f"{section}.f32").replace(folder / name)
            (folder / f"{_HELD}{STAMP}").write_text(json.dumps(asdict(stamp)), encoding="utf-8")
        except OSError as error:
            self._lacks = f"it cannot be set aside: {error}"
            return ()
        return (*names, f"{_HELD}{STAMP}")

    def recall(self, numel: int) -> RoundState | None:
        """What was set aside, if it is what its stamp says; None, with the reason in the log, where it is not."""
        stamp = _read(self._folder / f"{_HELD}{STAMP}")
        if stamp is None:
            if self._lacks:
                _refuse(why=self._lacks)
            return None
        files = {section: self._folder / f"{_HELD}{section}.f32" for section in stamp.sections}
        if any(file.stat().st_size != 4 * numel for file in files.values()):
            why = "its buffers have another length"
        else:
            sections = {n: torch.from_file(str(f), shared=True, size=numel) for n, f in files.items()}
            digest = digest_of(*sections.values())
            if digest == stamp.state_digest:
                return RoundState(stamp.round, stamp.record, stamp.state_digest, sections)
            why = f"it was being changed when the trainer died: digest {digest}, its stamp says {stamp.state_digest}"
        _refuse(round=stamp.round, why=why)
        return None

    def drop_held(self) -> None:
        """Give the memory of what was set aside back."""
        for file in self._folder.glob(f"{_HELD}*"):
            file.unlink(missing_ok=True)


def _refuse(**fields: object) -> None:
    _log.warning("what this node had in memory is not taken", extra={"fields": fields})


def _read(path: Path) -> MemoryStamp | None:
    with contextlib.suppress(OSError, ValueError):
        return TypeAdapter(MemoryStamp).validate_json(path.read_bytes(), strict=True)
    return None
