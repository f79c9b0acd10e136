"""What a node leaves behind of a stall: where each of its ranks stood, its newest events, its view of the run.

Linux. Every rank registers once; local rank 0 writes the bundles. Never ends a rank, and never raises into one.
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
from zeroband.observe.jsonl import encode_line, last_lines
from zeroband.observe.log import get_logger

STALLS_FOLDER = "stalls"
"""Name inside a node's folder of the run directory; holds a folder `<UTC time>-<number>` for each bundle."""

KEPT_BUNDLES = 8
EVENT_LINES = 200
_EVENT_BYTES = 1 << 20
"""Read of the end of the events, for these lines."""
_STACKS_BYTES = 1 << 20
"""A file of stacks is emptied when it is longer than this."""

_ANSWER_S = 1.0
_LOOK_S = 0.02
"""A dump is many small writes; it is whole when its file did not grow from one look to the next."""

_UNANSWERING = {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}
_SIGNAL = signal.SIGUSR2

_log = get_logger(__name__)


def register_stack_dump(node_dir: Path, local_rank: int) -> Callable[[], None]:
    """Have SIGUSR2 append the stacks of all threads to `rank<n>.stacks`, even while the main thread hangs in C.

    A thread for this writes them, with the interpreter's lock held: faulthandler, which walks the frames of running
    threads without it, can crash the rank (cpython issue 116008). So a call that never gives the lock back is not seen.
    The file's first line says which process writes to it; without that line it is not signalled. Returns what undoes
    it. Main thread only. Raises: OSError where the file cannot be written.
    """
    node_dir.mkdir(parents=True, exist_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
    file = os.fdopen(os.open(_stacks_path(node_dir, local_rank), flags, 0o644), "ab", buffering=0)
    signal.signal(_SIGNAL, signal.SIG_IGN)  # what is left once the dump is undone: a late signal must not kill
    asked, tell = os.pipe()  # numbers: they stay open whatever becomes of what is returned
    os.set_blocking(tell, False)
    before = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(_SIGNAL, _do_nothing)
    signal.siginterrupt(_SIGNAL, False)  # native code need not know of it

    def answer() -> None:
        while received := os.read(asked, 1):
            if received[0] == _SIGNAL:
                file.write(_stacks_of_all_threads())
            elif before != -1:
                with contextlib.suppress(OSError):  # the listener to signals before may be gone
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
    """The signal's number is in the pipe already."""


def _stacks_of_all_threads() -> bytes:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = [
        f"Thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}\n"
        for ident, frame in sys._current_frames().items()  # pyright: ignore[reportPrivateUsage]
        if ident != threading.get_ident()
    ]
    return "".join(stacks).encode()


def write_bundle(node_dir: Path, *, reason: str, view: Mapping[str, Any], rank_pids: Sequence[int]) -> Path | None:
    """Keep what explains a stall: `<node_dir>/stalls/<UTC time>-<number>/`, the newest `KEPT_BUNDLES` of them.

    `view`: what this node knows of the run, as JSON values. `rank_pids`: by local rank; they have `_ANSWER_S` in all.
    Local rank 0, one thread at a time. Returns None, and logs a warning, where the bundle cannot be written.
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
    """A rank that is asked for its stacks. `offset`: bytes in its file before; `silent`: why it is not asked."""

    local_rank: int
    pid: int
    path: Path
    offset: int = 0
    silent: str | None = None


def _collect_stacks(ranks: Iterable[_Rank]) -> list[str]:
    """The stacks of each rank, or why there are none."""
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
    """Signal a rank unless it cannot answer, or is not the process that registered."""
    try:
        handle = os.pidfd_open(rank.pid)  # stands for this process even if its number is given to another one
    except OSError as error:
        return replace(rank, silent=f"process {rank.pid} is gone ({error.strerror})")
    try:
        state, _ = _state_and_start(rank.pid)
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
    """What a rank wrote since it was asked, or why it wrote nothing."""
    if rank.silent is not None:
        return f"no stacks: {rank.silent}\n"
    with rank.path.open("rb") as file:
        file.seek(rank.offset)
        stacks = file.read()
    if rank.offset + len(stacks) > _STACKS_BYTES:
        os.truncate(rank.path, len(_header(rank.pid)))  # its writer appends, wherever the end is
    if not stacks:
        state, _ = _state_and_start(rank.pid)
        return f"no stacks: process {rank.pid} did not answer within {_ANSWER_S:g} s (state {state})\n"
    return stacks.decode(errors="replace")


def _fill(folder: Path, reason: str, view: Mapping[str, Any], stacks: Sequence[str], events: bytes) -> None:
    (folder / "reason.txt").write_text(f"{reason}\n", encoding="utf-8")
    strict: object = json.loads(encode_line(view))  # NaN and what JSON lacks as strings
    (folder / "view.json").write_text(json.dumps(strict, indent=2) + "\n", encoding="utf-8")
    for local_rank, text in enumerate(stacks):
        (folder / f"stacks.rank{local_rank}.txt").write_text(text, encoding="utf-8")
    (folder / EVENTS_FILE).write_bytes(events)


def newest_events(node_dir: Path) -> list[bytes]:
    """The last `EVENT_LINES` whole lines of a node's events; none where there is no such file."""
    return last_lines(node_dir / EVENTS_FILE, _EVENT_BYTES)[-EVENT_LINES:]


def _remove_old(folder: Path) -> None:
    """Keep the newest bundles, and nothing that a crash left half written."""
    paths = sorted(folder.iterdir(), key=_number)
    bundles = [path for path in paths if _number(path)]
    for path in (*bundles[:-KEPT_BUNDLES], *(path for path in paths if path.name.startswith("."))):
        shutil.rmtree(path, ignore_errors=True)


def _number(path: Path) -> int:
    """The running number of a bundle, by which they are in order whatever the clock did; 0 for anything else."""
    number = path.name.rpartition("-")[2]
    return int(number) if number.isdecimal() and not path.name.startswith(".") else 0


def _stacks_path(node_dir: Path, local_rank: int) -> Path:
    return node_dir / f"rank{local_rank}.stacks"


def _header(pid: int) -> bytes:
    """First line of a rank's file: a number of a process is given again, number and start time together are not."""
    return f"process {pid} started {_state_and_start(pid)[1]}\n".encode()


def _first_line(path: Path) -> bytes:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.readline(200)
    return b""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _state_and_start(pid: int) -> tuple[str, str]:
    """State letter of a process and its start in clock ticks since boot; X and "" where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", ""
    return fields[0], fields[19]
