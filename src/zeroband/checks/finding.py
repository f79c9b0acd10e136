"""The result of a check, and its consequence for a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from zeroband.errors import MachineUnfit

Stops = Literal["start", "finish"]
"""What a run on this machine cannot do: not begin, or begin but most likely not finish."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. `advice`: what to do; empty if all is well."""

    what: str
    seen: str
    advice: str = ""
    stops: Stops | None = None

    @property
    def is_fatal(self) -> bool:
        """Whether a run would not start, not work or not finish."""
        return self.stops is not None

    def __str__(self) -> str:
        return f"{self.what}: {self.seen}" + (f"; {self.advice}" if self.advice else "")


def require_start(findings: Iterable[Finding]) -> list[Finding]:
    """Raise MachineUnfit with a line per finding that prevents a start; returns the other fatal ones."""
    fatal = [finding for finding in findings if finding.is_fatal]
    if stopping := [str(finding) for finding in fatal if finding.stops == "start"]:
        raise MachineUnfit("\n".join(stopping))
    return fatal
