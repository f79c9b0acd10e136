"""Who is told of a node while it trains, as [observe] says. Local rank 0."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from zeroband.config.schema import RunConfig
from zeroband.observe.sinks import BackgroundSink, Sink
from zeroband.observe.trackers import TensorBoard, Trackio, Wandb


def open_trackers(config: RunConfig, node_dir: Path) -> list[Sink]:
    """Open a sink for each experiment tracker that is asked for; each starts in a thread, and may fail there."""
    settings, observe = config.model_dump(mode="json"), config.observe
    sinks: list[Sink] = []
    if (wandb := observe.wandb) is not None:
        opened = partial(Wandb, project=wandb.project, mode=wandb.mode, node_dir=node_dir, config=settings)
        sinks.append(BackgroundSink("wandb", opened))
    if observe.tensorboard is not None:
        sinks.append(BackgroundSink("tensorboard", partial(TensorBoard, node_dir=node_dir)))
    if (trackio := observe.trackio) is not None:
        place = {"project": trackio.project, "space_id": trackio.space_id}
        sinks.append(BackgroundSink("trackio", partial(Trackio, **place, node_dir=node_dir, config=settings)))
    return sinks
