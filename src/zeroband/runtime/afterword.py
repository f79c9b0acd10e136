"""What a node does when its part of a run is over: say where everything lies, and have the report written.

Local rank 0, after everything else was given back. Whatever goes wrong here is said and changes nothing.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from zeroband.config.schema import RunConfig
from zeroband.node.identity import node_dir_of
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import REPORT_FILE
from zeroband.observe.log import get_logger
from zeroband.runtime.loop import EXPORT_DIR, SAMPLE_FILE

_WRITER = ("-m", "zeroband.tools.report")
_NICE = 10
_WAIT_S = 5.0
"""Longest that a node stays for its report; a larger one is finished behind its back."""

_log = get_logger(__name__)


def end_of_run(config: RunConfig) -> str:
    """Have the report written if it is this node's turn. Returns what to tell the user: files, and what to do next.

    Empty where the run directory cannot be looked into: the run is over all the same.
    """
    run_dir = node_dir_of(config).parent
    report = run_dir / REPORT_FILE
    try:
        is_due = config.observe.report and is_last_here(run_dir, node_dir_of(config).name)
        if is_due:
            start_report(run_dir)
        return closing_words(config, report if is_due and report.exists() else None)
    except OSError as error:
        _log.warning("cannot look into the run directory", extra={"fields": {"path": run_dir, "why": str(error)}})
        return ""


def is_last_here(run_dir: Path, node_id: str) -> bool:
    """Whether no other trainer writes to this run directory any more. Of several that end together, each may be.

    A trainer holds a lock on its node's folder as long as it lives.
    """
    return not any(_is_held(folder) for folder in run_dir.iterdir() if folder.name != node_id and folder.is_dir())


def _is_held(folder: Path) -> bool:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # some network file systems have no locks
        return False
    finally:
        os.close(descriptor)
    return False


def start_report(run_dir: Path, *, wait_s: float = _WAIT_S, writer: Sequence[str] = _WRITER) -> None:
    """Write the report in a process of its own, with low priority; wait for it, but not long."""
    try:
        child = subprocess.Popen(
            [sys.executable, *writer, str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.setpriority(os.PRIO_PROCESS, child.pid, _NICE)
        code = child.wait(timeout=wait_s)
    except subprocess.TimeoutExpired:
        _log.info("the report is still being written", extra={"fields": {"path": run_dir / REPORT_FILE}})
        return
    except OSError as error:
        _log.warning("no report was written", extra={"fields": {"why": str(error)}})
        return
    if code:
        why = f"exit code {code}; zeroband report {run_dir} says why"
        _log.warning("no report was written", extra={"fields": {"why": why}})


def closing_words(config: RunConfig, report: Path | None) -> str:
    """Where everything of this run lies, and what to do next."""
    node_dir = node_dir_of(config)
    run_dir = node_dir.parent
    lines = [("metrics", str(run_dir)), ("events", str(node_dir / EVENTS_FILE))]
    checkpoints = None if config.ckpt.path is None else f"{config.ckpt.path.rstrip('/')}/{config.run.id}"
    if checkpoints:
        lines.append(("checkpoints", checkpoints))
    if (node_dir / SAMPLE_FILE).exists():
        lines.append(("sample", str(node_dir / SAMPLE_FILE)))
    exported = None if config.export is None else config.export.path or node_dir / EXPORT_DIR
    if exported is not None and exported.exists():
        lines.append(("model", str(exported)))
    if report is not None:
        lines.append(("report", str(report)))
    following = [f"zeroband status {run_dir}" if report is None else f"open {report}"]
    if checkpoints and exported is None:
        following.append(f"zeroband export {checkpoints} OUT")
    if checkpoints:
        following.append(f"zeroband sample {checkpoints} --prompt TEXT")
    lines.append(("next", following[0]))
    lines += [("", command) for command in following[1:]]
    return "\n".join(f"  {name:<12}{value}" for name, value in lines)
