"""What /proc/PID/stat says of a process. Fields have the numbers of proc(5). Linux only."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")


def fields_of(text: str) -> list[str]:
    """Return the fields from the state, field 3, on; field 2 is the name, which may contain spaces and brackets."""
    return text.rpartition(")")[2].split()


def _read(pid: int | str, proc: Path = _PROC) -> list[str] | None:
    """Return the fields of a process; None if it is gone."""
    try:
        return fields_of((proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None


def number_of(pid: int, field: int) -> int | None:
    """Return a field that is a number; None if the process is gone."""
    fields = _read(pid)
    return None if fields is None else int(fields[field - 3])


def state_of(pid: int | str, proc: Path = _PROC) -> str:
    """Return a process's state letter: T and t are stopped, Z and X dead or gone. `proc`: another /proc."""
    fields = _read(pid, proc)
    return "X" if fields is None else fields[0]


def parent_of(pid: int) -> int | None:
    """Return a process's parent; None if the process is gone."""
    return number_of(pid, 4)


def started_at_ticks(pid: int) -> int | None:
    """Return a process's start in clock ticks since boot; None if it is gone."""
    return number_of(pid, 22)


def identity_of(pid: int | str) -> str:
    """Return a process's id with its start, since ids are reused; empty if it is dead or gone."""
    fields = _read(pid)
    return "" if fields is None or fields[0] in "ZX" else f"{pid}:{fields[22 - 3]}"
