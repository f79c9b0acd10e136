"""The processors that this process may use, by its affinity and the quotas of its container."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_THREADS = "OMP_NUM_THREADS"


def usable_processors() -> int:
    """Return the processors of this process, at least 1: its affinity, limited by the quotas of its control groups."""
    return max(1, int(min(_allowed(), _granted())))


def share_processors(environ: MutableMapping[str, str], *, ranks: int) -> None:
    """Set OMP_NUM_THREADS to the processors per rank, since torch ignores quotas; before its import.

    A single rank with all processors keeps torch's default, one thread per core. Keeps the user's setting.
    """
    usable = usable_processors()
    if ranks > 1 or usable < _allowed():
        environ.setdefault(_THREADS, str(max(1, usable // ranks)))


def _allowed() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _granted() -> float:
    """Return the quota of the strictest control group of this process; infinite without one."""
    return min(_quotas(), default=math.inf)


def _quotas() -> Iterator[float]:
    try:
        lines = _OWN_GROUPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = _CGROUPS / controllers  # cgroup v2 has one tree without controllers
        group = root / place.lstrip("/")
        while True:  # parents limit it as well; a container may see only the root
            yield from _quota_of(group)
            if group == root or root not in group.parents:
                break
            group = group.parent


def _quota_of(group: Path) -> Iterator[float]:
    """Yield the quota of one control group, if it has one that is readable."""
    try:
        if (limit := group / "cpu.max").exists():
            quota, period = limit.read_text(encoding="ascii").split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (group / "cpu.cfs_period_us").read_text(encoding="ascii")
        processors = int(quota) / int(period)  # "max" raises ValueError
    except (OSError, ValueError, ZeroDivisionError):
        return
    if processors > 0:  # cgroup v1 writes -1 for no limit
        yield processors
