"""The outcome of each run as a JSON file, named by the digest of what it depends on. Finished ones are never repeated.

A run that failed leaves a file too, so that the table can show it, and is tried again by the next comparison.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from zeroband.tools.compare.trial_measures import Measured

FORMAT = 2
"""Number of the files' format, and part of every digest: another one makes all runs anew."""


@dataclass(frozen=True)
class Point:
    """The outer parameters at one place of the run."""

    step: int
    loss: float | None
    """On the text that is reported on, nats per token; None where it is not finite."""


@dataclass(frozen=True)
class Outcome:
    """One run: a method with one learning rate and one seed."""

    arm: str
    lr: float
    seed: int
    digest: str
    """Digest of its configuration, its start and how it is evaluated."""
    params: int = 0
    points: tuple[Point, ...] = ()
    tuning_loss: float | None = None
    """At the end of the run, on text that is not reported on: by which learning rates are chosen."""
    measured: Measured | None = None
    took_s: float = 0.0
    """Wall time of the run with starting and ending its processes."""
    failure: str = ""
    """Why there is no loss; empty: it ended well."""

    @property
    def loss(self) -> float | None:
        """Loss at the end of the run; None where it failed or diverged."""
        return self.points[-1].loss if self.points and not self.failure else None

    @property
    def state(self) -> str:
        """Say the state in a word, for the table."""
        if self.failure:
            return "failed"
        return "done" if self.loss is not None else "diverged"


def finite(loss: float) -> float | None:
    """A loss as it is kept."""
    return loss if math.isfinite(loss) else None


class ResultFiles:
    """The outcomes in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, digest: str) -> Outcome | None:
        """The outcome of a run that ended well, or diverged; None where there is none, or it cannot be read."""
        try:
            outcome = TypeAdapter(Outcome).validate_json(self._path(digest).read_bytes(), strict=True)
        except (OSError, ValueError):
            return None
        return None if outcome.failure or outcome.digest != digest else outcome

    def save(self, outcome: Outcome) -> None:
        """Keep an outcome; a reader sees the whole file or none."""
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._path(outcome.digest)
        draft = path.with_suffix(f".{os.getpid()}.part")
        record = {"format": FORMAT, **dataclasses.asdict(outcome)}
        draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        draft.replace(path)

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"
