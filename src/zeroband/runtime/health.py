"""Whether a trainer is alive and makes progress, judged from outside its process. Linux; no store, no torch.

A trainer is found by the file of stacks that each of its ranks keeps open.
"""

from __future__ import annotations

import contextlib
import json
import re
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

from zeroband.config.section import NONE
from zeroband.config.time_outs import TimeOuts
from zeroband.node.shared_flags import SharedFlags
from zeroband.node.shm import NodeFolder
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import CONFIG_FILE
from zeroband.observe.metrics import METRICS_FILE
from zeroband.observe.node_history import NodeHistory
from zeroband.observe.process_stat import state_of
from zeroband.observe.stall import newest_events
from zeroband.observe.view import NodeView

_STACKS = re.compile(r"rank\d+\.stacks")
_BAD_STATES = {"T": "stopped", "t": "stopped by a debugger", "Z": "dead", "X": "dead"}


def ranks_in(proc: Path) -> Iterator[tuple[Path, Path]]:
    """Yield for each rank the folder of its process below `proc`, and its node's folder of the run directory.

    Only those of this user and container: descriptors of others are not readable.
    """
    for process in proc.glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is not readable
            opened = {_target_of(file) for file in (process / "fd").iterdir()}
            yield from ((process, file.parent) for file in opened if _STACKS.fullmatch(file.name))


def _target_of(descriptor: Path) -> Path:
    """Return the target of a descriptor; an empty path if it was closed meanwhile."""
    try:
        return descriptor.readlink()
    except FileNotFoundError:
        return Path()


def problems_of(ranks: Sequence[tuple[Path, Path]]) -> Iterator[str]:
    """Yield a line for each problem of these ranks, as `ranks_in` yields them, and of their nodes."""
    for process, node_dir in ranks:
        if why := _BAD_STATES.get(state_of(process.name, process.parent)):
            yield f"{node_dir.name}: process {process.name} is {why}"
    for node_dir in sorted({node_dir for _, node_dir in ranks}):
        yield from stalls(node_dir)


def stalls(node_dir: Path) -> Iterator[str]:
    """Yield a line if a member shows no progress for `fault.hung_s`, as its guardian would judge.

    Waits during start-up and shutdown have their own deadlines.
    """
    view = _newest_view(node_dir)
    if view.join is not None or view.state in ("finished", "failed", "left"):
        return
    settings = tomllib.loads((node_dir / CONFIG_FILE).read_text(encoding="utf-8"))
    chosen = {name: None if value == NONE else value for name, value in settings["fault"].items()}
    hung_s = TimeOuts.following(settings["fault"]["detect_s"], chosen).hung_s
    silent_s = time.time() - max(_written_at_s(node_dir / name) for name in (METRICS_FILE, EVENTS_FILE))
    folder = NodeFolder.path_of(Path(settings["node"]["shm_dir"]), node_dir.parent.name, node_dir.name)
    with contextlib.suppress(FileNotFoundError):  # a single node has none
        flags = SharedFlags(folder / "flags", create=False)
        silent_s = min(silent_s, time.monotonic() - flags.advanced_at_s)
        flags.close()
    if silent_s > hung_s:
        yield f"{node_dir.name}: no progress for {silent_s:.0f} s (fault.hung_s={hung_s:g})"


def _newest_view(node_dir: Path) -> NodeView:
    """Read a node's state from its newest events."""
    history = NodeHistory(node_dir.name)
    for line in newest_events(node_dir):
        with contextlib.suppress(KeyError, TypeError, ValueError):
            history.add(json.loads(line))
    return history.newest


def _written_at_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
