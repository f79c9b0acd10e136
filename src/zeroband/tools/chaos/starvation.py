"""Whether a host gave a soak's processes a processor when they wanted one, by the kernel's own count of their waiting.

What is late because of that says nothing about the code: it is reported as starved. Linux only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NS_PER_S = 1e9


@dataclass(frozen=True)
class _Look:
    """How long everybody waited for a processor between two looks."""

    from_s: float
    to_s: float
    members_s: float
    """The member that waited the longest: a round waits for it."""
    waited_s: Mapping[str, float]

    def lost_s(self, from_s: float, to_s: float, names: Iterable[str]) -> float:
        """Return at most the part of the span that lies between these looks."""
        shared_s = min(self.to_s, to_s) - max(self.from_s, from_s)
        most_s = max([self.members_s, *(self.waited_s.get(name, 0.0) for name in names)])
        return max(0.0, min(shared_s, most_s))


class Starvation:
    """What a busy host cost a soak. Pure: times are in seconds since the soak began."""

    def __init__(self) -> None:
        self._looked_s = 0.0
        self._looks: list[_Look] = []

    def note(self, now_s: float, waited_s: Mapping[str, float], background: Iterable[str] = ()) -> None:
        """Take in how long each group waited since the last look. `background`: groups that others do not wait for."""
        apart = set(background)
        members_s = max((took_s for name, took_s in waited_s.items() if name not in apart), default=0.0)
        self._looks.append(_Look(self._looked_s, now_s, members_s, dict(waited_s)))
        self._looked_s = now_s

    def lost_s(self, from_s: float, to_s: float, names: Iterable[str] = ()) -> float:
        """The most by which the host can have delayed what everybody, or one of `names`, had to do in a span.

        Between two looks that is the longest waiting of one, since the others wait for it.
        """
        wanted = tuple(names)
        return sum(look.lost_s(from_s, to_s, wanted) for look in self._looks if look.to_s > from_s)

    def share(self, from_s: float, to_s: float) -> float:
        """The part of a span that was lost so, 0 to 1."""
        return self.lost_s(from_s, to_s) / (to_s - from_s) if to_s > from_s else 0.0


class QueueTimes:
    """Reads how long threads stood in the kernel's queue for a processor since they were last asked about."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], int] = {}

    def read(self, pids_of: Mapping[str, Iterable[int]]) -> dict[str, float]:
        """Seconds since the last call, by name: those of the one thread of its processes that waited the longest.

        A thread that was not there at the last call counts with all that it ever waited.
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
    """What each thread of a process has waited for a processor, in its life; empty where the process is gone."""
    found: dict[int, int] = {}
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return found
    for task in tasks:
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[1])
        except (OSError, IndexError):  # gone meanwhile, or a kernel that does not count
            continue
    return found
