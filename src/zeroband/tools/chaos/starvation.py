"""CPU starvation of a soak's processes, by the kernel's run-queue times. Linux only.

Delays that starvation explains say nothing about the code and are reported as starved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NS_PER_S = 1e9


@dataclass(frozen=True)
class _Look:
    """CPU waits between two measurements."""

    from_s: float
    to_s: float
    members_s: float
    """The wait of the member that waited longest, for which a round waits."""
    waited_s: Mapping[str, float]

    def lost_s(self, from_s: float, to_s: float, names: Iterable[str]) -> float:
        """Return the waiting time, at most the overlap with the span."""
        shared_s = min(self.to_s, to_s) - max(self.from_s, from_s)
        most_s = max([self.members_s, *(self.waited_s.get(name, 0.0) for name in names)])
        return max(0.0, min(shared_s, most_s))


class Starvation:
    """Accumulates CPU waits. Pure. Times are in seconds since the soak began."""

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._looks: list[_Look] = []

    def note(self, now_s: float, waited_s: Mapping[str, float], background: Iterable[str] = ()) -> None:
        """Add the waits of each group since the last call. `background`: groups that others do not wait for."""
        apart = set(background)
        members_s = max((took_s for name, took_s in waited_s.items() if name not in apart), default=0.0)
        self._looks.append(_Look(self._looked_s, now_s, members_s, dict(waited_s)))
        self._looked_s = now_s

    def lost_s(self, from_s: float, to_s: float, names: Iterable[str] = ()) -> float:
        """Return the maximum delay by CPU starvation of the members or one of `names` in a span.

        Between two measurements that is the longest wait of one of them, as the others wait for it.
        """
        wanted = tuple(names)
        return sum(look.lost_s(from_s, to_s, wanted) for look in self._looks if look.to_s > from_s)

    def share(self, from_s: float, to_s: float) -> float:
        """Return the fraction of a span lost to starvation."""
        return self.lost_s(from_s, to_s) / (to_s - from_s) if to_s > from_s else 0.0


class QueueTimes:
    """Reads run-queue times of threads."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], int] = {}

    def read(self, pids_of: Mapping[str, Iterable[int]]) -> dict[str, float]:
        """Return, by name, the longest wait of a single thread since the last call, in seconds.

        A new thread counts with its whole wait.
        """
        now: dict[tuple[int, int], int] = {}
        waited_s: dict[str, float] = {}
        for name, pids in pids_of.items():
            mine = {(pid, thread): waited_ns for pid in pids for thread, waited_ns in _waited_ns(pid).items()}
            grown = (waited_ns - self._before.get(place, 0) for place, waited_ns in mine.items())
            waited_s[name] = max(grown, default=0) / _NS_PER_S
            now |= mine
        self._before = now
        return waited_s


def _waited_ns(pid: int) -> dict[int, int]:
    """Return the total CPU wait of each thread of a process; empty if it is gone."""
    found: dict[int, int] = {}
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return found
    for task in tasks:
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):  # gone meanwhile, or a kernel without schedstat
            continue
    return found
