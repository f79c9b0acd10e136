"""Evidence of a stall: the stacks of a node's ranks, its newest events and its view of the run.

Linux. Every rank registers once; local rank 0 writes the bundles. Never ends a rank and never raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.jsonl import LineTail, encode_line
from zeroband.observe.log import get_logger
from zeroband.observe.process_stat import started_at_ticks, state_of

STALLS_FOLDER = "stalls"
"""Folder in a node's folder; holds a folder `<UTC time>-<number>` for each bundle."""

KEPT_BUNDLES = 8
EVENT_LINES = 200
_EVENT_BYTES = 1 << 20
_STACKS_BYTES = 1 << 20
"""Size above which a file of stacks is truncated."""

_ANSWER_S = 1.0
_LOOK_S = 0.02
"""A dump is complete when its file has not grown for this time."""

_UNANSWERING = {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}
_SIGNAL = signal.SIGUSR2

_log = get_logger(__name__)


def register_stack_dump(node_dir: Path, local_rank: int) -> Callable[[], None]:
    """Make SIGUSR2 append the stacks of all threads to `rank<n>.stacks`, even while the main thread hangs in C.

    A thread writes them while holding the GIL, because faulthandler walks running threads' frames without it and can
    crash the rank (cpython issue 116008). A call that never releases the GIL is therefore not seen. The file's first
    line identifies the process; without it the process is not signalled. Returns a function that undoes the
    registration. Main thread only. Raises OSError if the file cannot be written.
    """
    node_dir.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    file = os.fdopen(os.open(_stacks_path(node_dir, local_rank), flags, 0o644), "ab", buffering=0)
    signal.signal(_SIGNAL, signal.SIG_IGN)  # also the state after `close`: a late signal must not kill
    asked, tell = os.pipe()  # raw descriptors: they stay open if the result is garbage collected
    os.set_blocking(tell, False)
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(_SIGNAL, _do_nothing)
    signal.siginterrupt(_SIGNAL, False)  # native code sees no EINTR

    def answer() -> None:
        while received := os.read(asked, 1):
            if received[0] == _SIGNAL:
                file.write(_stacks_of_all_threads())
            elif before != -1:
                with contextlib.suppress(OSError):  # the previous listener may be gone
                    os.write(before, received)

    writer = threading.Thread(target=answer, name="stacks", daemon=True)
    writer.start()
    file.write(_header(os.getpid()))

    def close() -> None:
        if not file.closed:
            signal.signal(_SIGNAL, signal.SIG_IGN)
            signal.set_wakeup_fd(before)
            os.close(tell)
            writer.join()
            os.close(asked)
            os.ftruncate(file.fileno(), 0)
            file.close()

    return close


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    """Handle the signal: the wakeup descriptor already has its number."""


def _stacks_of_all_threads() -> bytes:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}\n"
        for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]
        if ident != threading.get_ident()
    ]
    return "".join(stacks).encode()


def write_bundle(node_dir: Path, *, reason: str, view: Mapping[str, Any], rank_pids: Sequence[int]) -> Path | None:
    """Write a bundle `<node_dir>/stalls/<UTC time>-<number>/` and keep the newest `KEPT_BUNDLES`.

    `view`: the node's view of the run, as JSON values. `rank_pids`: by local rank; together they get `_ANSWER_S`.
    Local rank 0, one thread at a time. Returns None and logs a warning if the bundle cannot be written.
    """
    folder = node_dir / STALLS_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stacks = _collect_stacks([_Rank(n, pid, _stacks_path(node_dir, n)) for n, pid in enumerate(rank_pids)])
        number = 1 + max((_number(path) for path in folder.iterdir()), default=0)
        unfinished = folder / f".{number}"
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
        _fill(unfinished, reason, view, stacks, b"".join(newest_events(node_dir)))
        bundle = folder / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{number}"
        unfinished.rename(bundle)
        _remove_old(folder)
    except (OSError, TypeError, ValueError) as error:
        _log.warning("no stall bundle", extra={"fields": {"folder": folder, "error": error, "stall": reason}})
        return None
    _log.warning("stalled", extra={"fields": {"reason": reason, "bundle": bundle}})
    return bundle


@dataclass(frozen=True)
class _Rank:
    """A rank to ask for its stacks. `offset`: size of its file before; `silent`: why it is not asked."""

    local_rank: int
    pid: int
    path: Path
    offset: int = 0
    silent: str | None = None


def _collect_stacks(ranks: Iterable[_Rank]) -> list[str]:
    """Return the stacks of each rank, or the reason for their absence."""
    asked = [_ask(rank) for rank in ranks]
    end_s = time.monotonic() + _ANSWER_S
    sizes, seen = [rank.offset for rank in asked], list[int]()
    while time.monotonic() < end_s:
        time.sleep(_LOOK_S)
        sizes, seen = [_size(rank.path) for rank in asked], sizes
        is_whole = (
            r.silent or (size > r.offset and size == old) for r, size, old in zip(asked, sizes, seen, strict=True)
        )
        if all(is_whole):
            break
    return [_answer(rank) for rank in asked]


def _ask(rank: _Rank) -> _Rank:
    """Signal a rank unless it cannot answer or did not register."""
    try:
        handle = os.pidfd_open(rank.pid)  # safe if the pid is reused
    except OSError as error:
        return replace(rank, silent=f"process {rank.pid} is gone ({error.strerror})")
    try:
        state = state_of(rank.pid)
        if state in _UNANSWERING:
            return replace(rank, silent=f"process {rank.pid} is {_UNANSWERING[state]} (state {state})")
        if _first_line(rank.path) != _header(rank.pid):
            return replace(rank, silent=f"process {rank.pid} did not register in {rank.path.name}")
        rank = replace(rank, offset=_size(rank.path))
        signal.pidfd_send_signal(handle, _SIGNAL)
        return rank
    except OSError as error:
        return replace(rank, silent=f"process {rank.pid} cannot be asked: {error.strerror}")
    finally:
        os.close(handle)


def _answer(rank: _Rank) -> str:
    """Return what a rank wrote since it was asked, or why it wrote nothing."""
    if rank.silent is not None:
        return f"no stacks: {rank.silent}\n"
    with rank.path.open("rb") as file:
        file.seek(rank.offset)
        stacks = file.read()
    if rank.offset + len(stacks) > _STACKS_BYTES:
        os.truncate(rank.path, len(_header(rank.pid)))  # safe: the rank writes in append mode
    if not stacks:
        state = state_of(rank.pid)
        return f"no stacks: process {rank.pid} did not answer within {_ANSWER_S:g} s (state {state})\n"
    return stacks.decode(errors="replace")


def _fill(folder: Path, reason: str, view: Mapping[str, Any], stacks: Sequence[str], events: bytes) -> None:
    (folder / "reason.txt").write_text(f"{reason}\n", encoding="utf-8")
    strict: object = json.loads(encode_line(view))  # NaN and infinities as strings
    (folder / "view.json").write_text(json.dumps(strict, indent=2) + "\n", encoding="utf-8")
    for local_rank, text in enumerate(stacks):
        (folder / f"stacks.rank{local_rank}.txt").write_text(text, encoding="utf-8")
    (folder / EVENTS_FILE).write_bytes(events)


def newest_events(node_dir: Path) -> list[bytes]:
    """Return the last `EVENT_LINES` whole lines of a node's events."""
    lines = LineTail(node_dir / EVENTS_FILE, most_behind=_EVENT_BYTES).lines()
    return [line + b"\n" for _, line in lines[-EVENT_LINES:] if line is not None]


def _remove_old(folder: Path) -> None:
    """Remove old bundles and unfinished ones from crashes."""
    paths = sorted(folder.iterdir(), key=_number)
    bundles = [path for path in paths if _number(path)]
    for path in (*bundles[:-KEPT_BUNDLES], *(path for path in paths if path.name.startswith("."))):
        shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    """Return the sequence number of a bundle, which orders them regardless of the clock; 0 for other paths."""
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() and not path.name.startswith(".") else 0


def _stacks_path(node_dir: Path, local_rank: int) -> Path:
    return node_dir / f"rank{local_rank}.stacks"


def _header(pid: int) -> bytes:
    """Return the first line of a rank's file; pid and start time are unique where pids are reused."""
    return f"process {pid} started {started_at_ticks(pid)}\n".encode()


def _first_line(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.readline(200)
    return b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
