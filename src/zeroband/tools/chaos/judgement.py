"""The result of a soak: all invariants held, some did not, or there was too little evidence. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_VIOLATED, EXIT_UNJUDGED = 1, 3


@dataclass(frozen=True)
class Judgement:
    """Totals of a soak, and the conclusion from them."""

    run_dir: str
    rounds: int
    """Committed rounds in the nodes' files."""
    samples: int
    """Samples trained in them."""
    compared: int
    """Rounds recorded by two or more nodes, so that results were compared."""
    calm_rounds: int
    """Whole rounds of single nodes in the baseline."""
    calm_s: float
    planned: int
    struck: int
    """Number of planned faults that were injected."""
    later_rounds: int
    """Rounds committed after the first fault."""
    violations: Sequence[str] = ()
    starved: Sequence[str] = ()
    """What was late because of CPU starvation."""
    is_interrupted: bool = False
    complete_s: float | None = None
    """When the run was complete, which ends a soak early."""
    unseen: tuple[str, ...] = ()
    """Requested kinds of faults that were never injected."""
    retries: int = 0
    fences: int = 0
    mismatches: int = 0
    hangs: int = 0
    audit: str = ""
    """Summary of the data audit."""
    cpu_share: float = 0.0
    """Fraction of all cores used by the nodes and the store in the baseline."""
    calm_starved: float = 0.0
    """Fraction of the baseline in which some member waited for a CPU."""
    storm_starved: float = 0.0
    """Likewise, for the phase with faults."""
    restart_cpu_s: tuple[float, ...] = ()
    """CPU time of each restarted node until it was a member."""

    @property
    def headline(self) -> str:
        """The result in a few words, the worst first."""
        if self.violations:
            return f"{len(self.violations)} VIOLATION{'S' * (len(self.violations) > 1)}"
        if self.is_interrupted:
            return "interrupted, no conclusion"
        if self.lacking:
            return "NO EVIDENCE, no conclusion"
        if self.starved:
            return "STARVED, no conclusion: the host had no CPU for what was late"
        return "all invariants held"

    @property
    def exit_code(self) -> int:
        """0: all held; 1: violations; 3: no conclusion."""
        if self.violations:
            return EXIT_VIOLATED
        return EXIT_UNJUDGED if self.lacking or self.starved or self.is_interrupted else 0

    @property
    def lines(self) -> list[str]:
        """The findings, one line each."""
        kinds = (("VIOLATION", self.violations), ("NO EVIDENCE", self.lacking), ("STARVED", self.starved))
        return [f"{kind}: {text.partition(chr(10))[0]}" for kind, texts in kinds for text in texts]

    @property
    def lacking(self) -> list[str]:
        """What is missing for a conclusion, and how to obtain it."""
        said: list[str] = []
        if self.complete_s is not None:
            said.append(
                f"the run was complete at {self.complete_s:.0f} s, before the end of the soak: raise train.total_steps"
            )
        if not self.rounds:
            said.append(f"no node recorded a round in {self.run_dir}")
        elif not self.compared:
            said.append("no round was recorded by two nodes, so no results were compared")
        if not self.samples:
            said.append("no sample was trained in a committed round, so no data could be lost")
        if not self.calm_rounds:
            said.append(
                f"no baseline: no whole round within the {self.calm_s:.0f} s without faults; raise --baseline-minutes"
            )
        if not self.struck:
            said.append(f"none of {self.planned} planned faults was injected: raise --minutes or lower --mtbf-s")
        elif self.unseen:
            said.append(f"no fault of {', '.join(self.unseen)} was injected: raise --minutes or lower --mtbf-s")
        elif not self.later_rounds:
            said.append("no round was committed after the first fault")
        return said
