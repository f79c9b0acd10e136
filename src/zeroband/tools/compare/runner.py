"""Makes a run as real processes and evaluates it: counters, and losses of its checkpoints.

Runs in the main thread, which owns the processes. A run's checkpoints are removed afterwards; its metrics are kept.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from zeroband.checkpoint.layout import folder_of
from zeroband.checkpoint.loading import steps_in_order
from zeroband.checkpoint.storage import open_storage
from zeroband.errors import ZerobandError
from zeroband.observe.view import RunView
from zeroband.tools.cluster.forked import ForkedNode
from zeroband.tools.cluster.local import LocalCluster
from zeroband.tools.compare.results import Point, RunResult, finite, measured
from zeroband.tools.compare.texts import Half, Texts, loss_on
from zeroband.tools.compare.trials import Trial

_POLL_S = 0.2
_GRACE_S = 5.0
_SHOWN_LINES = 12

OnProgress = Callable[[float], None]
"""Receives the finished fraction of the run."""


class RunFailed(ZerobandError):
    """A node failed, or the time limit was exceeded."""


class Stopped(ZerobandError):
    """The user interrupted the comparison."""


class Runner:
    """Makes runs below a folder. `is_stopped` is polled."""

    def __init__(
        self, folder: Path, *, texts: Texts | None, limit_s: float, samples: int, is_stopped: Callable[[], bool]
    ) -> None:
        self._folder = folder
        self._texts = texts
        self._limit_s = limit_s
        self._samples = samples
        self._is_stopped = is_stopped

    def run(self, trial: Trial, start: Path | None, on_progress: OnProgress) -> RunResult:
        """Return the result of a run, also if it failed. Raises Stopped."""
        began_s = time.monotonic()
        outcome = RunResult(trial.arm.name, trial.lr, trial.seed, trial.digest)
        from_start = [] if start is None else [f"--train.init-from={start.absolute()}"]
        arguments = [*trial.arguments, *from_start]
        try:
            view, records = self._train(trial.run_id, arguments, trial.nodes, trial.arm.is_alone, on_progress)
            counters = measured(records)
            points, tuning_loss = self._evaluate(trial.run_id)
        except Stopped:
            raise
        except (ZerobandError, OSError, ValueError) as error:
            return replace(outcome, failure=str(error), took_s=time.monotonic() - began_s)
        finally:
            shutil.rmtree(self._checkpoints / trial.run_id, ignore_errors=True)
        params = next((node.parameters for node in view.nodes if node.parameters), 0)
        took_s = time.monotonic() - began_s
        found = replace(outcome, params=params, points=points, tuning_loss=tuning_loss)
        return replace(found, measured=counters, took_s=took_s)

    def warm_up(self, arguments: Sequence[str], run_id: str, out: Path, on_progress: OnProgress) -> None:
        """Train the common start and export it as a directory. Raises RunFailed, Stopped."""
        try:
            self._train(run_id, arguments, 1, True, on_progress)
            self._write_trained(run_id, out)
        finally:
            shutil.rmtree(self._checkpoints / run_id, ignore_errors=True)

    def _write_trained(self, run_id: str, out: Path) -> None:
        from zeroband.export.directory import write_directory  # imported lazily: loads torch
        from zeroband.export.opened import open_trained

        write_directory(open_trained(str(self._checkpoints / run_id)).model, out, "float32")

    @property
    def _checkpoints(self) -> Path:
        return self._folder.absolute() / "checkpoints"

    def _train(
        self, run_id: str, arguments: Sequence[str], nodes: int, is_alone: bool, on_progress: OnProgress
    ) -> tuple[RunView, list[list[dict[str, object]]]]:
        """Train. Returns the run's view and the metrics of each node."""
        for folder in (self._folder / "runs" / run_id, self._checkpoints / run_id):
            shutil.rmtree(folder, ignore_errors=True)  # of an interrupted comparison
        cluster = LocalCluster(
            self._folder / "runs",
            [*arguments, f"--ckpt.path={self._checkpoints}"],
            nodes=nodes,
            run_id=run_id,
            alone=is_alone,
            node=ForkedNode,
        )
        with cluster:
            for _ in range(nodes):
                cluster.start()
            self._watch(cluster, on_progress)
            return cluster.view(), [node.metrics() for node in cluster.nodes.values()]

    def _watch(self, cluster: LocalCluster, on_progress: OnProgress) -> None:
        """Wait until all nodes have finished. Raises RunFailed as soon as one fails, Stopped."""
        end_s = time.monotonic() + self._limit_s
        while True:
            running = cluster.running
            for node in cluster.nodes.values():
                if node.exit_code:
                    raise RunFailed(f"{node.node_id} ended with {node.exit_code}: {node.console_tail(_SHOWN_LINES)}")
            if not running:
                break
            if self._is_stopped():
                cluster.stop(grace_s=_GRACE_S)
                raise Stopped("interrupted")
            if time.monotonic() > end_s:
                raise RunFailed(f"not finished after {self._limit_s:g} s")
            view = cluster.view()
            total = max((node.total_steps or 0 for node in view.nodes), default=0)
            if total:
                on_progress(min(node.step for node in view.nodes) / total)
            time.sleep(_POLL_S)
        if wrong := cluster.view().disagreements:
            raise RunFailed(f"nodes held different outer states after rounds {', '.join(map(str, wrong))}")

    def _evaluate(self, run_id: str) -> tuple[tuple[Point, ...], float | None]:
        """Return the loss of every checkpoint by ascending step, and the tuning loss of the last."""
        from zeroband.export.opened import open_trained  # imported lazily: loads torch
        from zeroband.tools.offline.opened import device_of

        steps = sorted(steps_in_order(open_storage(str(self._checkpoints), run_id)))
        if not steps:
            raise RunFailed("the run left no checkpoint")
        device = device_of(None)

        def loss(step: int, half: Half) -> float | None:
            opened = open_trained(str(self._checkpoints / run_id / folder_of(step)))
            return finite(loss_on(half, opened, self._texts, device, samples=self._samples))

        return tuple(Point(step, loss(step, "reported")) for step in steps), loss(steps[-1], "tuning")
