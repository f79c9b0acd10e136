"""The schedule: after which inner step which fragment is sent, and after which its mean is applied. Pure; no clock.

Source: Streaming DiLoCo, arXiv:2501.18512, algorithm 2. Fragment p of P is sent after the steps t > p H / P with (t -
p H / P) mod H = 0 and applied `overlap` steps later, so one is sent every H / P steps. P = 1 without overlap is
DiLoCo; P = 1 with overlap H is eager and naively delayed DiLoCo (arXiv:2502.12996). Where a step both sends and
applies, it sends first: what is sent is relative to the outer parameters before they move.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroband.errors import ConfigError


@dataclass(frozen=True)
class StreamingSchedule:
    """Inner steps count from 1, over the whole run."""

    inner_steps: int
    """Between two synchronisations of the same fragment (H)."""
    fragments: int = 1
    """P."""
    overlap: int = 0
    """Inner steps during which a fragment travels (tau); 0: training waits for it."""

    def __post_init__(self) -> None:
        steps, count = self.inner_steps, self.fragments
        if steps < 1 or count < 1:
            raise ConfigError(f"outer.inner_steps={steps} and outer.fragments={count} must be 1 or more")
        if steps % count:
            below = steps // count * count
            nearest = f"{below} or {below + count}" if below else str(count)
            raise ConfigError(
                f"outer.inner_steps={steps} is not a multiple of outer.fragments={count}; nearest: {nearest}"
            )
        if not 0 <= self.overlap <= steps:
            raise ConfigError(f"outer.overlap={self.overlap} is outside 0 to outer.inner_steps={steps}")

    @property
    def spacing(self) -> int:
        """Inner steps from one fragment to the next."""
        return self.inner_steps // self.fragments

    @property
    def most_in_flight(self) -> int:
        """Fragments that travel at the same time, at most."""
        return -(-self.overlap // self.spacing)

    def sent_after(self, step: int) -> int | None:
        """The fragment to send after this inner step."""
        fragment = step // self.spacing % self.fragments
        is_due = step % self.spacing == 0 and step >= self.inner_steps + fragment * self.spacing
        return fragment if is_due else None

    def applied_after(self, step: int) -> int | None:
        """The fragment whose mean is applied after this inner step, sent `overlap` steps before."""
        return self.sent_after(step - self.overlap)

    def is_unsynchronised(self, fragment: int, step: int) -> bool:
        """Whether a fragment has inner steps, after this one, that were not sent: then the end of the run sends it."""
        return step % self.inner_steps != fragment * self.spacing or step < self.inner_steps + fragment * self.spacing

    def peak_bytes(self, fragment_bytes: Sequence[int]) -> int:
        """Most bytes that are on their way at the same time. `fragment_bytes`: of each fragment, in order."""
        return max(sum(self._window(fragment_bytes, first)) for first in range(self.fragments))

    def peak_bytes_per_s(self, fragment_bytes: Sequence[int], step_s: float) -> float:
        """The rate that a link needs so that training never waits: the peak that this schedule promises.

        Each fragment may take the whole overlap; those that travel at the same time add up. Infinite without overlap.
        """
        return self.peak_bytes(fragment_bytes) / (self.overlap * step_s) if self.overlap else float("inf")

    def _window(self, fragment_bytes: Sequence[int], first: int) -> list[int]:
        """Bytes of the fragments that travel together, beginning with this one."""
        if len(fragment_bytes) != self.fragments:
            raise ValueError(f"bytes of {len(fragment_bytes)} fragments, the schedule has {self.fragments}")
        together = max(self.most_in_flight, 1)
        return [fragment_bytes[(first + i) % self.fragments] for i in range(together)]
