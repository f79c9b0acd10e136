"""What a node does before its first event, as far as its processes on this machine, or its folder, show it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

_TORCH = "libtorch"


def process_words(rank_pids: Sequence[int]) -> str:
    """What a node does whose launcher runs with these ranks. Linux: looks at what the first rank has mapped."""
    if not rank_pids:
        return "its launcher starts Python"
    try:
        with Path(f"/proc/{rank_pids[0]}/maps").open(errors="replace") as maps:
            has_torch = any(_TORCH in line for line in maps)
    except OSError:  # it has just ended
        return "its rank has ended"
    return "its rank has torch, makes model and data" if has_torch else "its rank checks the configuration, loads torch"


def folder_words(run_dir: Path, known: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Tell what those nodes do that have a folder in the run directory and no event in it, and for how many seconds.

    `known`: the nodes that have one.
    """
    words: dict[str, tuple[str, float]] = {}
    try:
        folders = [path for path in run_dir.iterdir() if path.name not in known and (path / "rank0.log").exists()]
        for path in folders:
            since_s = max(0.0, time.time() - (path / "rank0.log").stat().st_mtime)
            words[path.name] = ("its configuration is read; no event yet", since_s)
    except OSError:  # removed meanwhile
        return {}
    return words
