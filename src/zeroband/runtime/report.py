"""A node's events, and the metrics of its rounds and steps. Local rank 0 only."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from zeroband.config.schema import RunConfig
from zeroband.config.shared import shared_digest
from zeroband.config.stability import cautions_of
from zeroband.data.ledger import Ledger, count
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.store.fact_publisher import RETRY_S, FactPublisher
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.base import sum_known
from zeroband.errors import DISTRIBUTION, ConfigError, Leaving, RunOver
from zeroband.node.async_copy import PendingNumbers
from zeroband.node.page import SharedPage
from zeroband.observe.events import EventLog, Events, NoEvents
from zeroband.observe.hardware import free_ratio, peak_flops_of_all, resident_bytes
from zeroband.observe.log import format_fields, get_logger
from zeroband.observe.metrics import MetricsLog, MetricValue, ddp_bytes, perplexity
from zeroband.observe.prometheus import Exporter, MetricsServer
from zeroband.observe.sinks import BackgroundSink, Sink
from zeroband.observe.trackers import TensorBoard, Trackio, Wandb
from zeroband.observe.webhook import AlertRules, Webhook
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.health import problems_of, ranks_in, stalls
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.run_folder import RunFolder, claim, own_key, run_keys

_SHOWN = ("train/loss", "train/tokens_per_s", "train/mfu", "train/lr", "outer/round", "outer/nodes", "outer/wait_s")
"""Metrics on the console line."""

_AT_THE_END = ("eval/loss", "eval/bits_per_byte", "data/pass/")
"""Prefixes of the metrics whose last values the `run_finished` event carries."""

_OF_SOURCE = ("train/loss/<source>", "data/tokens/<source>", "data/pass/<source>")
"""Metrics of each source of a mixture."""

SAMPLE_FILE = "sample.txt"
EXPORT_DIR = "export"

_UNKNOWN = "unknown"
_GIT_S = 5.0
_HASH_DIGITS = 12

_log = get_logger(__name__)


@dataclass(frozen=True)
class SourceResult:
    """Results of one inner step for one source of a mixture, summed over the local ranks."""

    tokens: int
    """Number of targets."""
    data_pass: float
    """Passes over the source after the step."""
    loss: float | None = None
    """Mean cross entropy in nats per token; None without targets, or if the model computes its own loss."""


@dataclass(frozen=True)
class PassResult:
    """Result of the forward and backward passes of one inner step."""

    nats: Tensor
    """(1 + sources,) float32 on the device: summed cross entropy of this rank's targets, first of all, then per source.

    (1,) for a single source, or if the model does not give a loss per target."""
    tokens: int
    """Targets of the whole node."""
    data_s: float
    data_pass: int
    sources: Mapping[str, SourceResult] = field(default_factory=dict[str, SourceResult])
    """By name, without losses; empty for a single source."""


@dataclass(kw_only=True)
class InnerStep:
    """One inner step of the node, over all local ranks."""

    number: int
    """Starts at 0."""
    lr: float
    lr_muon: float | None = None
    """Learning rate of Muon's matrices; None if they have no separate one."""
    passed: PassResult
    pending: PendingNumbers
    """Gradient norm, then `PassResult.nats` summed over the ranks."""
    blocked_s: float = 0.0
    """Time that the outer algorithm blocked training."""
    synced: Sequence[RoundReport] = ()
    """Rounds that this step applied to the state."""
    progress: Progress = field(default_factory=Progress.at_start)
    """Progress of the run after its newest committed round."""
    is_commit: bool = False
    """Whether that round was committed at the end of this step."""
    measured: Mapping[str, MetricValue | None] = field(default_factory=dict[str, MetricValue | None])
    """Metrics of checkpoints and of an evaluation."""
    ended_at_s: float = 0.0
    """Monotonic time at which the device finished the step."""
    grad_norm: float = math.nan
    loss: float = math.nan
    """Mean cross entropy in nats per token; NaN without targets."""
    sources: Mapping[str, SourceResult] = field(default_factory=dict[str, SourceResult])

    def read(self) -> None:
        """Wait until the device has finished the step, and fetch its gradient norm and losses."""
        self.grad_norm, nats, *each = self.pending.read()
        self.loss, self.sources = mean_of(nats, self.passed.tokens), self.passed.sources
        if each:
            read = zip(self.sources.items(), each, strict=True)
            self.sources = {
                name: replace(one, loss=nats / one.tokens if one.tokens else None) for (name, one), nats in read
            }


def mean_of(nats: float, tokens: int) -> float:
    """Return the mean loss of an inner step; NaN without targets."""
    return nats / tokens if tokens else math.nan


class Report:
    """What a training loop reports of its node. This base class drops everything: it serves ranks other than 0."""

    events: Events = NoEvents()

    def run_entered(self, session: str, joined: Sequence[RoundReport], verified_at_s: float | None) -> None:
        """Report that training begins in a run, and the round of the entry. `joined`, `verified_at_s`: of `Entry`."""

    def round_committed(self, round: RoundReport) -> None:
        """Report a round that was applied between two inner steps."""

    def record(self, step: int, values: Mapping[str, MetricValue | None], synced: Sequence[RoundReport]) -> None:
        """Report the metrics of inner step `step` (counted from 1) and the rounds that it applied."""

    def step_done(self, made: InnerStep) -> None:
        """Report an inner step of the trainer whose results were read."""

    def run_finished(self) -> None:
        """Report that all inner steps of the run are done."""


class NodeReport(Report):
    """Writes one node's metrics.jsonl, events.jsonl and console line. `total_steps`: None for an endless run.

    Raises ConfigError if another process writes to the node's folder or it holds another run; StoreLost.
    """

    def __init__(self, node: NodeParts, *, parameters: int, total_steps: int | None) -> None:
        config = node.config
        self._node = node
        self._parameters = parameters
        self._total_steps = total_steps
        self._claim = claim(node)
        self._folder = RunFolder(node.node_dir)
        try:
            self._folder.prepare(config, node.node_id, os.environ)
            watchers = open_watchers(config, node.node_id, node.node_dir)
        except BaseException:
            os.close(self._claim)
            raise
        self.events = self._events = EventLog(node.node_dir, watchers)
        self._metrics = MetricsLog(node.node_dir, [*watchers, *open_trackers(config, node.node_dir)])
        self._publisher = _publisher_of(node)
        self._members: tuple[str, ...] = ()
        self._leaving: tuple[str, ...] = ()
        """Members that leave after the newest round."""
        self._steps_since_round = 0
        self._verified_at_s: float | None = None
        """When the state that the next step starts from was verified."""
        self._newest: dict[str, MetricValue] = {}
        """Latest held-out results and data passes, by metric."""

    def started(self) -> None:
        if self._node.config.outer is not None:
            _log.info("time-outs of [fault]", extra={"fields": asdict(self._node.config.fault.time_outs)})
        config = self._node.config
        fault = {} if config.outer is None else {"detect_s": config.fault.detect_s}
        self.events.emit(
            "node_started",
            total_steps=self._total_steps,
            local_world_size=self._node.local.world_size,
            parameters=self._parameters,
            **fault,
        )

    def run_entered(self, session: str, joined: Sequence[RoundReport], verified_at_s: float | None) -> None:
        self._folder.set_session(session)
        for round in joined:
            self.round_committed(round)
        self._steps_since_round, self._verified_at_s = 0, verified_at_s

    def record(self, step: int, values: Mapping[str, MetricValue | None], synced: Sequence[RoundReport]) -> None:
        self._restore_folder()
        self._steps_since_round += 1
        if self._verified_at_s is not None:
            self.events.emit("first_step", step=step, after_s=round(time.monotonic() - self._verified_at_s, 3))
            self._verified_at_s = None
        if synced:
            values = {**values, **self._round_values(synced)}
        for report in synced:
            self.round_committed(report)
        self._metrics.record(step, values)
        for name, value in values.items():
            if name.startswith(_AT_THE_END) and value is not None:
                self._newest[name.replace("/", "_")] = value
        if step % self._node.config.observe.log_every_steps == 0 or synced:
            self._log_step(step, values)

    def _restore_folder(self) -> None:
        """Recreate the node's folder if it was removed. Raises ConfigError if another process has it now."""
        if self._folder.exists():
            return
        with contextlib.suppress(OSError):  # a full or missing disk must not end the training
            fresh = claim(self._node)
            os.dup2(fresh, self._claim, inheritable=False)
            os.close(fresh)
            self._folder.restore()
            _log.warning(
                "the run's folder was removed; recreated it without its former content",
                extra={"fields": {"path": self._node.node_dir}},
            )

    def _round_values(self, rounds: Sequence[RoundReport]) -> dict[str, MetricValue | None]:
        """Return the newest round's values; times and bytes are summed over all rounds."""
        round = rounds[-1]
        nodes = len(round.members)
        steps, self._steps_since_round = self._steps_since_round, 0
        return {
            "outer/round": round.round,
            "outer/epoch": round.epoch,
            "outer/nodes": nodes,
            "outer/digest": round.state_digest,
            "outer/wait_s": sum(r.wait_s for r in rounds),
            "outer/transfer_s": sum(r.transfer_s for r in rounds),
            "outer/apply_s": sum(r.apply_s for r in rounds),
            "outer/retries": sum(r.retries for r in rounds),
            "outer/weight": round.weights[round.members.index(round.member_id)],
            "outer/trust": round.trust,
            "outer/gain": dict(round.gains).get(round.member_id),
            "outer/score_s": sum(r.score_s or 0.0 for r in rounds) or None,
            "outer/sent_bytes": sum(r.sent_bytes for r in rounds),
            "outer/received_bytes": sum(r.received_bytes for r in rounds),
            "outer/wide_bytes": sum_known(r.wide_bytes for r in rounds),
            "outer/payload_bytes": round.payload_bytes,
            "outer/payload_ratio": None if not round.payload_bytes else 2 * self._parameters / round.payload_bytes,
            "outer/ddp_bytes": ddp_bytes(nodes, self._parameters, steps),
        }

    def round_committed(self, round: RoundReport) -> None:
        for reason in round.failures:
            self.events.emit("round_retried", round=round.round, reason=reason)
        expected = [member for member in self._members if member not in self._leaving]
        lost = [member for member in expected if member not in (*round.members, *round.late)]
        self._leaving = round.leaving
        if lost and round.member_id in self._members:
            self.events.emit("peer_lost", round=round.round, member_ids=lost)
        if round.members != self._members:
            self._members = round.members
            self.events.emit("epoch_changed", epoch=round.epoch, members=list(round.members))
        if round.is_left_out:
            self.events.emit("update_refused", round=round.round, reason="it is not finite")
        for member_id, reason in round.refused:
            self.events.emit("payload_refused", round=round.round, member_id=member_id, reason=reason)
        for member_id, gain in round.gains:
            self.events.emit("payload_scored", round=round.round - 1, member_id=member_id, gain=gain)
        self.events.emit(
            "round_committed",
            round=round.round,
            epoch=round.epoch,
            members=list(round.members),
            digest=round.state_digest,
            weights=list(round.weights),
            samples=list(round.samples),
            late=list(round.late),
            carried=[list(carried) for carried in round.carried],
            **({"claims": round.claims} if round.claims else {}),
            progress=round.progress.to_record(),
        )

    def _log_step(self, step: int, values: Mapping[str, Any]) -> None:
        fields = {name.partition("/")[2]: values[name] for name in _SHOWN if values.get(name) is not None}
        end = "" if self._total_steps is None else f"/{self._total_steps}"
        _log.info(f"step {step}{end} {format_fields(fields)}")

    def run_finished(self) -> None:
        self.events.emit("run_finished", step=self._total_steps, **self._newest)

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Write the node's last event. Runs after everything else was closed."""
        if kind is not None and issubclass(kind, Exception) and not issubclass(kind, RunOver | Leaving):
            self.events.emit("run_failed", error=f"{kind.__name__}: {error}")
        self.events.emit("left", reason="done" if kind is None else str(error) or kind.__name__)

    def cut_off(self) -> None:
        """Write the last event when the process ends before `leave`. Called by another thread."""
        self.events.emit("left", reason="asked to leave, in the middle of an inner step that did not stop")

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._metrics.close()
        self._events.close()
        os.close(self._claim)


def _publisher_of(node: NodeParts) -> FactPublisher | None:
    """Return the publisher of the node's records in the store; None for a single node or without observe.publish."""
    config = node.config
    if config.outer is None or config.store.address is None or not config.observe.publish:
        return None
    url, run_id = config.store.address, config.run.id
    own = own_key(node.node_dir)

    def open_store() -> RedisStore:
        key = run_keys(config, node.node_dir)
        return RedisStore(url, run_id, key=key, lease_s=RETRY_S, retry_s=RETRY_S)

    return FactPublisher(node.node_dir, own.name(node.node_id), open_store)


class TrainerReport(NodeReport):
    """The trainer's report on local rank 0."""

    def __init__(self, node: TrainerParts) -> None:
        config = node.config
        super().__init__(node, parameters=node.model.trained().numel, total_steps=config.train.total_steps)
        self._trainer = node
        self._flops_per_token = node.model.flops_per_token(config.data.seq_length)
        self._peak_flops = peak_flops_of_all({card.uuid: card.name for card in node.local.cards}.values())
        self._uncommitted_tokens = 0
        self._step_from_s = time.monotonic()

    def started(self) -> None:
        for caution in cautions_of(self._trainer.config, params=self._parameters):
            kind = "the configuration may be unstable" if caution.is_unstable else "caution about the configuration"
            _log.warning(kind, extra={"fields": {"key": caution.key, "why": caution.why, "way_out": caution.way_out}})
        super().started()

    def run_entered(self, session: str, joined: Sequence[RoundReport], verified_at_s: float | None) -> None:
        super().run_entered(session, joined, verified_at_s)
        self._uncommitted_tokens = 0
        self._step_from_s = time.monotonic()

    def step_done(self, made: InnerStep) -> None:
        """Record the metrics of a step. Its duration excludes an evaluation."""
        tokens, evaluated_s = made.passed.tokens, float(made.measured.get("eval/took_s") or 0.0)
        step_s, self._step_from_s = made.ended_at_s - self._step_from_s - evaluated_s, made.ended_at_s
        self._uncommitted_tokens += tokens
        if made.is_commit:
            self._uncommitted_tokens = made.synced[-1].uncommitted_tokens if made.synced else 0
        rate, device = tokens / step_s, self._node.local.device
        values: dict[str, MetricValue | None] = {
            "train/loss": made.loss,
            "train/perplexity": perplexity(made.loss),
            "train/lr": made.lr,
            "train/lr_muon": made.lr_muon,
            "train/grad_norm": made.grad_norm,
            "train/tokens": made.progress.tokens + self._uncommitted_tokens,
            "train/tokens_per_s": rate,
            "train/step_s": step_s,
            "train/data_s": made.passed.data_s,
            "outer/blocked_s": None if self._node.config.outer is None else made.blocked_s,
            "train/mfu": None if self._peak_flops is None else rate * self._flops_per_token / self._peak_flops,
            "data/pass": made.passed.data_pass,
            "node/rss_bytes": resident_bytes(),
            "node/gpu_peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
            **_source_values(made.sources),
            **made.measured,
        }
        if made.synced:
            values |= _ledger_values(made.progress.ledgers.values())
        self.record(made.number + 1, values, made.synced)


def open_report(node: TrainerParts, stack: ExitStack) -> Report:
    """Open this rank's report; `stack` writes its last event and closes it."""
    if node.local.rank != 0:
        return Report()
    report = TrainerReport(node)
    stack.callback(report.close)
    if node.config.observe.board:
        stack.enter_context(closing(SharedPage(node.config, node.node_dir)))
    report.started()
    stack.push(report.leave)  # its last event follows the release of all that is opened later
    departure = node.departure
    stack.callback(setattr, departure, "on_cut_off", departure.on_cut_off)  # signal handlers hold it to the exit
    departure.on_cut_off = report.cut_off
    return report


def _source_values(sources: Mapping[str, SourceResult]) -> dict[str, MetricValue | None]:
    values: dict[str, MetricValue | None] = {}
    for name, one in sources.items():
        measured = (one.loss, one.tokens or None, one.data_pass)
        values.update(zip((metric.replace("<source>", name) for metric in _OF_SOURCE), measured, strict=True))
    return values


def _ledger_values(ledgers: Collection[Ledger]) -> dict[str, MetricValue | None]:
    return {
        "data/next": sum(ledger.next for ledger in ledgers),
        "data/returned_samples": sum(count(ledger.returned) for ledger in ledgers),
    }


# -- sinks that [observe] asks for -----------------------------------------------------------------------------------


def open_trackers(config: RunConfig, node_dir: Path) -> list[Sink]:
    """Create a sink for each configured experiment tracker. Each starts in its thread and may fail there."""
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
    """Open the sinks that take both metrics and events. Raises ConfigError if one is not usable."""
    sinks: list[Sink] = []
    webhook = config.observe.webhook
    if webhook is not None and webhook.url is None:
        raise ConfigError("observe.webhook has no url; set ZERO_BAND_OBSERVE__WEBHOOK__URL, or remove the section")
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
            problems=partial(_problems_of, node_dir),
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
    """Return the commit of a git clone, with `-dirty` after uncommitted changes; `unknown` if it is no clone."""
    if not (clone / ".git").exists():
        return _UNKNOWN
    command = ["git", "-C", str(clone), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_GIT_S).stdout
    except (OSError, subprocess.SubprocessError):
        return _UNKNOWN
    return said.strip() or _UNKNOWN


def _problems_of(node_dir: Path) -> Sequence[str]:
    """Return what `zeroband health` reports of this node. A drop-in loop has no rank files, so only stalls are seen."""
    ranks = [rank for rank in ranks_in(Path("/proc")) if rank[1] == node_dir.resolve()]
    return list(problems_of(ranks) if ranks else stalls(node_dir))
