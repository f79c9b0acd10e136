"""How many processors this process may use: those that it may run on, and as much of them as its container grants."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_THREADS = "OMP_NUM_THREADS"


def usable_processors() -> int:
    """Whole processors for this process, at least 1: its affinity, cut down to the quotas of its control groups."""
    return max(1, int(min(_allowed(), _granted())))


def share_processors(environ: MutableMapping[str, str], *, ranks: int) -> None:
    """Give each of `ranks` its part of the processors as threads of torch, which knows of no quota; before its import.

    A rank that has all processors to itself keeps torch's own choice, one thread a core. What the user set stays.
    """
    usable = usable_processors()
    if ranks > 1 or usable < _allowed():
        environ.setdefault(_THREADS, str(max(1, usable // ranks)))


def _allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _granted() -> float:
    """Processors that the strictest group over this process grants; infinite where none limits it."""
    return min(_quotas(), default=math.inf)


def _quotas() -> Iterator[float]:
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / controllers  # the second version names no controllers, and has one tree
        group = root / place.lstrip("/")
        while True:  # its parents limit it, too; in a container only the root may be there
            yield from _quota_of(group)
            if group == root or root not in group.parents:
                break
            group = group.parent


def _quota_of(group: Path) -> Iterator[float]:
    """Processors of one control group; nothing where it has no limit, or none that can be read."""
    try:
        if (limit := group / "cpu.max").exists():
            quota, period = limit.read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        processors = int(quota) / int(period)  # "max" is no number
    except (OSError, ValueError, ZeroDivisionError):
        return
    if processors > 0:  # the first version writes -1 for none
        yield processors
