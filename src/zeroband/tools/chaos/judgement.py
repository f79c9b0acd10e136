"""What a soak may conclude: that all held, that something did not, or that there was too little to judge by. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_VIOLATED, EXIT_UNJUDGED = 1, 3


@dataclass(frozen=True)
class Judgement:
    """What a soak saw, over the whole of it, and what that shows."""

    run_dir: str
    rounds: int
    """Committed, as the nodes' files tell."""
    samples: int
    """Trained in them."""
    compared: int
    """Rounds that two nodes or more recorded, so that their results could differ."""
    calm_rounds: int
    """Whole ones of single nodes in the undisturbed phase."""
    calm_s: float
    planned: int
    struck: int
    """Number of planned faults that struck."""
    later_rounds: int
    """Committed after the first fault."""
    violations: Sequence[str] = ()
    starved: Sequence[str] = ()
    """What was late because the host had no processor for it."""
    is_interrupted: bool = False
    complete_s: float | None = None
    """When the run was complete, which ends a soak; None: it was not."""
    unseen: tuple[str, ...] = ()
    """Kinds of faults that were asked for by name, of which none struck."""
    retries: int = 0
    fences: int = 0
    mismatches: int = 0
    hangs: int = 0
    audit: str = ""
    """What became of the data."""
    cpu_share: float = 0.0
    """Part of all cores that the nodes and the store took in the undisturbed phase."""
    calm_starved: float = 0.0
    """Part of the undisturbed phase in which some member waited for a processor."""
    storm_starved: float = 0.0
    """Part of the phase with faults in which some member waited for a processor."""
    restart_cpu_s: tuple[float, ...] = ()
    """CPU time that each restarted node needed until it was a member."""

    @property
    def headline(self) -> str:
        """Say the result in a few words, the worst first."""
        if self.violations:
            return f"{len(self.violations)} VIOLATION{'S' * (len(self.violations) > 1)}"
        if self.is_interrupted:
            return "interrupted, so nothing is concluded"
        if self.lacking:
            return "NO EVIDENCE, so nothing is concluded"
        if self.starved:
            return "STARVED, cannot judge: the host had no processor for what was late"
        return "all invariants held"

    @property
    def exit_code(self) -> int:
        """0: all held; another one for violations than for a soak that shows nothing."""
        if self.violations:
            return EXIT_VIOLATED
        return EXIT_UNJUDGED if self.lacking or self.starved or self.is_interrupted else 0

    @property
    def lines(self) -> list[str]:
        """Each finding on one line, with what it is."""
        kinds = (("VIOLATION", self.violations), ("NO EVIDENCE", self.lacking), ("STARVED", self.starved))
        return [f"{kind}: {text.partition(chr(10))[0]}" for kind, texts in kinds for text in texts]

    @property
    def lacking(self) -> list[str]:
        """What is missing for a conclusion, and how to get it; empty where nothing is."""
        said: list[str] = []
        if self.complete_s is not None:
            said.append(
                f"the run was complete at {self.complete_s:.0f} s, before the soak was over: "
                "raise train.total_steps so far that it is never reached"
            )
        if not self.rounds:
            said.append(f"no node recorded a round in {self.run_dir}")
        elif not self.compared:
            said.append("no round was recorded by two nodes, so no results were compared")
        if not self.samples:
            said.append("no sample was trained in a committed round, so no data could be lost")
        if not self.calm_rounds:
            said.append(
                f"no baseline: no whole round fell into the {self.calm_s:.0f} s without faults; "
                "raise --baseline-minutes"
            )
        if not self.struck:
            said.append(f"no fault struck, {self.planned} were planned: raise --minutes or lower --mtbf-s")
        elif self.unseen:
            said.append(f"no fault struck of {', '.join(self.unseen)}: raise --minutes or lower --mtbf-s")
        elif not self.later_rounds:
            said.append("no round was committed after the first fault")
        return said
