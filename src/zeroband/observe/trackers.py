"""Experiment trackers as services of a BackgroundSink; their packages are imported when opened.

`node_dir`: `<run.dir>/<run.id>/<node id>`, which names the tracker's run. `config`: the resolved configuration without
secrets.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from zeroband.observe.sinks import Service

TENSORBOARD_FOLDER = "tensorboard"
"""Folder in a node's folder."""

_WANDB_SETTINGS = {"console": "off", "silent": True, "disable_git": True, "save_code": False, "x_disable_meta": True}
"""x_disable_meta (wandb 0.19+): do not record the command line, which may contain a secret."""

_TRACKIO_REMOTES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")
"""With one of these in the environment, trackio sends records there regardless of its arguments."""


class Wandb(Service):
    """Weights & Biases. Each start of a node is a run in a group named after the run."""

    def __init__(
        self, *, project: str, mode: Literal["online", "offline"], node_dir: Path, config: Mapping[str, object]
    ) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(
            settings=wandb.Settings(**_WANDB_SETTINGS),
            project=project,
            mode=mode,
            dir=str(node_dir),
            group=node_dir.parent.name,
            name=_run_name(node_dir),
            config=dict(config),
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(record)

    def close(self) -> None:
        self._run.finish()


class TensorBoard(Service):
    """TensorBoard event files in the node's folder: each metric over inner steps."""

    def __init__(self, *, node_dir: Path) -> None:
        tensorboard: Any = importlib.import_module("torch.utils.tensorboard")
        self._writer = tensorboard.SummaryWriter(str(node_dir / TENSORBOARD_FOLDER))

    def write(self, record: Mapping[str, Any]) -> None:
        step, at_s = record["step"], record["at_s"]
        for name, value in _curves(record).items():
            self._writer.add_scalar(name, value, step, walltime=at_s)

    def close(self) -> None:
        self._writer.close()


class Trackio(Service):
    """A trackio run, local (TRACKIO_DIR) unless a Hugging Face Space is given.

    A restarted node continues its run. Raises RuntimeError if the environment would send records elsewhere.
    """

    def __init__(self, *, project: str, space_id: str | None, node_dir: Path, config: Mapping[str, object]) -> None:
        remotes = [name for name in _TRACKIO_REMOTES if os.environ.get(name)]
        if space_id is None and remotes:
            raise RuntimeError(f"{remotes[0]} is set but observe.trackio.space_id is not: refusing to send records")
        trackio: Any = importlib.import_module("trackio")
        self._run = trackio.init(
            project,
            name=_run_name(node_dir),
            group=node_dir.parent.name,
            space_id=space_id,
            config=dict(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(_curves(record), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def _run_name(node_dir: Path) -> str:
    return f"{node_dir.parent.name}/{node_dir.name}"


def _curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numeric metrics of a record."""
    return {
        name: value for name, value in record.items() if name not in ("step", "at_s") and not isinstance(value, str)
    }
