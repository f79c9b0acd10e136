"""Who is told of a node while it trains, as [observe] says. Local rank 0."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from pathlib import Path

from zeroband.config.schema import RunConfig
from zeroband.config.shared import shared_digest
from zeroband.errors import DISTRIBUTION, ConfigError
from zeroband.observe.hardware import free_ratio
from zeroband.observe.prometheus import Exporter, MetricsServer
from zeroband.observe.sinks import BackgroundSink, Sink
from zeroband.observe.trackers import TensorBoard, Trackio, Wandb
from zeroband.observe.webhook import AlertRules, Webhook
from zeroband.runtime.health import ailments, ranks_in, stalls

_UNKNOWN = "unknown"
_GIT_S = 5.0
_HASH_DIGITS = 12


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


def open_watchers(config: RunConfig, node_id: str, node_dir: Path) -> list[Sink]:
    """Open the sinks that take metrics and events alike. Raises ConfigError where one cannot do what is asked of it."""
    sinks: list[Sink] = []
    webhook = config.observe.webhook
    if webhook is not None and webhook.url is None:
        raise ConfigError("observe.webhook has no url; set ZERO_BAND_OBSERVE__WEBHOOK__URL, or leave it out")
    if (prometheus := config.observe.prometheus) is not None:
        folders = {"run.dir": node_dir}
        if config.data.cache_dir is not None:
            folders["data.cache_dir"] = config.data.cache_dir
        if config.ckpt.path is not None and "://" not in config.ckpt.path:
            folders["ckpt.path"] = Path(config.ckpt.path)
        exporter = Exporter(
            run_id=config.run.id,
            node_id=node_id,
            build={
                "version": metadata.version(DISTRIBUTION),
                "git": commit_of(Path(__file__).parents[3]),
                "torch": metadata.version("torch"),
                "config_hash": shared_digest(config)[:_HASH_DIGITS],
            },
            folders=folders,
            saves=config.ckpt.path is not None,
            ailments=partial(_ailments_of, node_dir),
        )
        sinks.append(MetricsServer(exporter, host=prometheus.host, port=prometheus.port, node_dir=node_dir))
    if webhook is not None and webhook.url is not None:
        hook = Webhook(
            webhook.url.get_secret_value(),
            kinds=webhook.events,
            run_id=config.run.id,
            node_id=node_id,
            rules=AlertRules(node_id, stalled_s=webhook.stalled_s),
            free_ratio=partial(free_ratio, node_dir),
        )
        sinks.append(BackgroundSink("webhook", lambda: hook))
    return sinks


def commit_of(clone: Path) -> str:
    """Return the commit that a clone stands at, with `-dirty` where files of it were changed; `unknown` elsewhere."""
    if not (clone / ".git").exists():
        return _UNKNOWN
    command = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return said.strip() or _UNKNOWN


def _ailments_of(node_dir: Path) -> Sequence[str]:
    """What `zeroband health` says of this node; a loop of one's own leaves no ranks to be found."""
    ranks = [rank for rank in ranks_in(Path("/proc")) if rank[1] == node_dir.resolve()]
    return list(ailments(ranks) if ranks else stalls(node_dir))
