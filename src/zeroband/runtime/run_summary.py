"""The end of a node's part in a run: show where its files are, and have the report written.

Local rank 0, after everything else was released. Failures here are logged and change nothing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from zeroband.config.schema import RunConfig
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import Leaving, RunOver
from zeroband.node.launched import is_last_start, rank_and_world_size
from zeroband.node.names import node_dir_of
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.facts import REPORT_FILE
from zeroband.observe.log import get_logger
from zeroband.observe.words import typed
from zeroband.runtime.report import EXPORT_DIR, SAMPLE_FILE
from zeroband.runtime.run_folder import is_claimed

_WRITER = ("-m", "zeroband.cli", "report")
_NICE = 10
_WAIT_S = 5.0
"""Longest wait for the report; a larger one is finished in the background."""

_log = get_logger(__name__)


class RunSummary:
    """Context of a rank's training that writes the summary at its end, unless the node never entered a run.

    After a signal it takes no longer than the rest of `fault.grace_s`; after Ctrl-C or a second signal it does not wait
    at all. After a failure, only the launcher's last start writes it.
    """

    def __init__(self, config: RunConfig, departure: Departure, say: Callable[[str], object]) -> None:
        self._config = config
        self._departure = departure
        self._say = say

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        is_over = kind is None or issubclass(kind, Leaving | RunOver | SystemExit) or is_last_start(os.environ)
        if not is_over or not self._departure.holds_work or rank_and_world_size(os.environ)[0] != 0:
            return
        left_s = 0.0 if kind is SystemExit else self._departure.time_left_s(time.monotonic())
        with contextlib.suppress(SystemExit):  # of a signal: the exit code stays, the wait ends
            if said := end_of_run(self._config, is_complete=kind is None, wait_s=min(_WAIT_S, left_s)):
                self._say(said)


def end_of_run(config: RunConfig, *, is_complete: bool = True, wait_s: float = _WAIT_S) -> str:
    """Have the report written if it is this node's turn; returns the summary for the user.

    Empty if the run directory is not readable: the run is over nevertheless.
    """
    run_dir = node_dir_of(config).parent
    report = run_dir / REPORT_FILE
    try:
        is_due = config.observe.report and is_last_here(run_dir, node_dir_of(config).name)
        is_made = is_due and start_report(run_dir, wait_s=wait_s)
        return summary_of(config, report if is_made else None, is_complete=is_complete)
    except OSError as error:
        _log.warning("cannot read the run directory", extra={"fields": {"path": run_dir, "why": str(error)}})
        return ""


def is_last_here(run_dir: Path, node_id: str) -> bool:
    """Whether no other living trainer has a folder in this run directory. True on several nodes that end together."""
    return not any(is_claimed(folder) for folder in run_dir.iterdir() if folder.name != node_id and folder.is_dir())


def start_report(run_dir: Path, *, wait_s: float = _WAIT_S, writer: Sequence[str] = _WRITER) -> bool:
    """Write the report in a low-priority process, and wait briefly. Returns whether it is written or in progress."""
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
        _log.info("the report is finished in the background", extra={"fields": {"path": run_dir / REPORT_FILE}})
        return True
    except OSError as error:
        _log.warning("no report was written", extra={"fields": {"why": str(error)}})
        return False
    if code:
        why = f"exit code {code}; {typed('report', run_dir)} says why"
        _log.warning("no report was written", extra={"fields": {"why": why}})
    return not code


def summary_of(config: RunConfig, report: Path | None, *, is_complete: bool = True) -> str:
    """Return where the run's files are, and the next commands. `report`: written, or in progress."""
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
    if offline := sorted((node_dir / "wandb").glob("offline-run-*")):
        lines.append(("wandb", f"wandb sync {shlex.quote(str(offline[-1]))}"))
    if report is not None:
        lines.append(("report", str(report) if report.exists() else f"{report}, in a moment"))
    following = [typed("status" if report is None else "board", run_dir)]
    if checkpoints and not is_complete:
        following.append(f"the same command, with {shlex.join(['--run.id', config.run.id, '--resume'])}")
    if checkpoints and is_complete and exported is None:
        following.append(typed("export", checkpoints, "OUT"))
    if checkpoints and is_complete:
        following.append(typed("sample", checkpoints, "--prompt", "TEXT"))
    lines.append(("next", following[0]))
    lines += [("", command) for command in following[1:]]
    return "\n".join(f"  {name:<12}{value}" for name, value in lines)
