"""What a node tells of itself: events, and the metrics of its rounds and of the trainer's steps. Local rank 0 only."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch

from zeroband.config.cautions import cautions_of
from zeroband.data.ledger import Ledger, count
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.elastic.store.fact_publisher import PATIENCE_S, FactPublisher
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.base import sum_known
from zeroband.errors import ConfigError, Leaving, RunOver
from zeroband.node.page import SharedPage
from zeroband.observe.events import EventLog, Events, NoEvents
from zeroband.observe.hardware import peak_flops_of_all, resident_bytes
from zeroband.observe.log import format_fields, get_logger
from zeroband.observe.metrics import MetricsLog, MetricValue, ddp_bytes, perplexity
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.node_parts import NodeParts
from zeroband.runtime.own_key import own_key, run_keys
from zeroband.runtime.run_folder import RunFolder
from zeroband.runtime.watching import open_trackers, open_watchers

_SHOWN = ("train/loss", "train/tokens_per_s", "train/mfu", "train/lr", "outer/round", "outer/nodes", "outer/wait_s")
"""Metrics of the console line."""

_AT_THE_END = ("eval/loss", "eval/bits_per_byte", "data/pass/")
"""How the metrics begin whose last values are told at the end of the run."""

_OF_SOURCE = ("train/loss/<source>", "data/tokens/<source>", "data/pass/<source>")
"""Names of what is measured of each source."""

_SAMPLE_CHARS = 1000
"""What goes of a generated text into its event, and with that to the run's store."""

_LOOKED_AT_S = 1.0

_log = get_logger(__name__)


class LoopReport(Protocol):
    """What any training loop tells of its node, whichever of the node's ranks it runs on."""

    @property
    def events(self) -> Events: ...

    def belongs_to(self, session: str) -> None:
        """This node is in the run of this session."""
        ...

    def entered(self, round: RoundReport) -> None:
        """This node became a member."""
        ...

    def committed(self, round: RoundReport) -> None:
        """The state got another round, between two inner steps."""
        ...

    def record(self, step: int, values: Mapping[str, MetricValue | None], synced: Sequence[RoundReport]) -> None:
        """Inner step `step` (counted from 1) is done, and the state got these rounds with it."""
        ...

    def finished(self) -> None:
        """All inner steps of the run are done."""
        ...


class NodeReport:
    """One node's metrics.jsonl and events.jsonl, and the console line. `total_steps`: None: the run has no end.

    Raises ConfigError where another process writes to the node's folder, or it holds another run; StoreLost.
    """

    def __init__(self, node: NodeParts, *, parameters: int, total_steps: int | None) -> None:
        config = node.config
        self._node = node
        self._parameters = parameters
        self._total_steps = total_steps
        self._claim = _claim(node)
        self._folder = RunFolder(node.node_dir)
        try:
            self._folder.prepare(config, node.node_id, os.environ)
            watchers = open_watchers(config, node.node_id, node.node_dir)
        except BaseException:
            os.close(self._claim)
            raise
        self.events = EventLog(node.node_dir, watchers)
        self._metrics = MetricsLog(node.node_dir, [*watchers, *open_trackers(config, node.node_dir)])
        self._publisher = _publisher_of(node)
        self._members: tuple[str, ...] = ()
        self._steps_since_round = 0
        self._newest: dict[str, MetricValue] = {}
        """The newest results on held-out samples, and passes over each source, by metric."""

    def started(self) -> None:
        if self._node.config.outer is not None:
            _log.info("time-outs", extra={"fields": asdict(self._node.config.fault.time_outs)})
        config = self._node.config
        company = {} if config.outer is None else {"detect_s": config.fault.detect_s}
        self.events.emit(
            "node_started",
            total_steps=self._total_steps,
            local_world_size=self._node.local.world_size,
            parameters=self._parameters,
            **company,
        )

    def entered(self, round: RoundReport) -> None:
        """This node became a member."""
        self._round_event(round)
        self._steps_since_round = 0

    def belongs_to(self, session: str) -> None:
        """This node is in the run of this session."""
        self._folder.belongs_to(session)

    def committed(self, round: RoundReport) -> None:
        """The state got another round, between two inner steps."""
        self._round_event(round)

    def record(self, step: int, values: Mapping[str, MetricValue | None], synced: Sequence[RoundReport]) -> None:
        """Inner step `step` (counted from 1) is done, and the state got these rounds with it."""
        self._keep_folder()
        self._steps_since_round += 1
        if synced:
            values = {**values, **self._round_values(synced)}
        for report in synced:
            self._round_event(report)
        self._metrics.record(step, values)
        for name, value in values.items():
            if name.startswith(_AT_THE_END) and value is not None:
                self._newest[name.replace("/", "_")] = value
        if step % self._node.config.observe.log_every_steps == 0 or synced:
            self._say(step, values)

    def _keep_folder(self) -> None:
        """Make a removed folder of the node anew. Raises ConfigError where another process has it now."""
        if self._folder.is_there():
            return
        with contextlib.suppress(OSError):  # a disk that is full or gone ends no training
            claim = _claim(self._node)
            os.dup2(claim, self._claim, inheritable=False)
            os.close(claim)
            self._folder.restore()
            _log.warning(
                "the run's folder was removed; it is made anew, without what it held",
                extra={"fields": {"path": self._node.node_dir}},
            )

    def _round_values(self, rounds: Sequence[RoundReport]) -> dict[str, MetricValue | None]:
        """The newest round's values; times and bytes are summed over all rounds."""
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

    def _round_event(self, round: RoundReport) -> None:
        for reason in round.failures:
            self.events.emit("round_retried", round=round.round, reason=reason)
        lost = [member for member in self._members if member not in (*round.members, *round.late)]
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
            progress=round.progress.to_record(),
        )

    def _say(self, step: int, values: Mapping[str, Any]) -> None:
        fields = {name.partition("/")[2]: values[name] for name in _SHOWN if values.get(name) is not None}
        end = "" if self._total_steps is None else f"/{self._total_steps}"
        _log.info(f"step {step}{end} {format_fields(fields)}")

    def finished(self) -> None:
        self.events.emit("run_finished", step=self._total_steps, **self._newest)

    def leave(
        self, kind: type[BaseException] | None, error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Say how this node's part ends; called when everything else is given back."""
        if kind is not None and issubclass(kind, Exception) and not issubclass(kind, RunOver | Leaving):
            self.events.emit("run_failed", error=f"{kind.__name__}: {error}")
        self.events.emit("left", reason="done" if kind is None else str(error) or kind.__name__)

    def cut_off(self) -> None:
        """Say how it ends where the process does before `leave`. Another thread's."""
        self.events.emit("left", reason="asked to leave, in the middle of an inner step that did not stop")

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
        self._metrics.close()
        self.events.close()
        os.close(self._claim)


def _publisher_of(node: NodeParts) -> FactPublisher | None:
    """What shows the node in the run's store; None for one that trains alone, or that is not to be shown."""
    config = node.config
    if config.outer is None or config.store.address is None or not config.observe.publish:
        return None
    url, run_id = config.store.address, config.run.id
    own = own_key(node.node_dir)

    def open_store() -> RedisStore:
        key = run_keys(config, node.node_dir)
        return RedisStore(url, run_id, key=key, lease_s=PATIENCE_S, patience_s=PATIENCE_S)

    return FactPublisher(node.node_dir, own.name(node.node_id), open_store)


def _claim(node: NodeParts) -> int:
    """Lock the node's folder, which two trainers must not share; the kernel frees it with its owner."""
    node.node_dir.mkdir(parents=True, exist_ok=True)
    folder = os.open(node.node_dir, os.O_RDONLY)
    with contextlib.suppress(OSError):  # some network file systems have no locks
        try:
            _lock(folder)
        except BlockingIOError:
            os.close(folder)
            if _is_open_here(node.node_dir):
                raise ConfigError(
                    f"this process is node {node.node_id!r} of run.id={node.config.run.id!r} already, as where a cell "
                    "of a notebook is run twice; close the optimizer that was made first: optimizer.close()"
                ) from None
            raise ConfigError(
                f"node.id={node.node_id!r} of run.id={node.config.run.id!r} is already running and writes to "
                f"{node.node_dir}; give this one another node.id or run.id"
            ) from None
    return folder


def _is_open_here(path: Path) -> bool:
    """Whether this process has a folder open."""
    opened = Path("/proc/self/fd")
    names = opened.iterdir() if opened.is_dir() else ()
    return any(os.path.realpath(name) == os.path.realpath(path) for name in names)


def _lock(folder: int) -> None:
    """Lock a folder; another node that ends may look at it for a moment. Raises BlockingIOError."""
    until_s = time.monotonic() + _LOOKED_AT_S
    while True:
        try:
            return fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until_s:
                raise
        time.sleep(0.05)


@dataclass(frozen=True)
class SourceResult:
    """What one inner step showed of one source of a mixture, summed over the node's ranks."""

    tokens: int
    """Its targets."""
    data_pass: float
    """Passes over it when the step ended."""
    loss: float | None = None
    """Mean cross entropy in nats per token; None where it had no target, or the model's loss is its own."""


@dataclass(frozen=True)
class StepResult:
    """What one inner step showed, summed over the node's ranks."""

    loss: float
    """Mean cross entropy in nats per token."""
    tokens: int
    lr: float
    grad_norm: float
    data_s: float
    blocked_s: float
    """In which training stood still for the outer algorithm."""
    data_pass: int
    ended_at_s: float
    """When the device was done with it, by the process's monotonic clock."""
    lr_muon: float | None = None
    """Learning rate of the matrices; None: they have none apart."""
    sources: Mapping[str, SourceResult] = field(default_factory=dict[str, SourceResult])
    """By name; empty with a single source."""


@dataclass(frozen=True)
class RunProgress:
    """The run after its newest committed round."""

    progress: Progress
    is_now: bool
    """Whether that round ended with the step that is reported."""


class Report(LoopReport, Protocol):
    """What the trainer's own loop tells as well."""

    def stepped(
        self,
        step: int,
        learned: StepResult,
        synced: Sequence[RoundReport],
        committed: RunProgress,
        beside: Mapping[str, MetricValue | None],
    ) -> None:
        """Inner step `step` (counted from 1) is done. `beside`: what checkpoints and an evaluation measured."""
        ...

    def sampled(self, path: Path) -> None: ...

    def exported(self, path: Path, parity: str) -> None: ...


class SilentReport:
    """The report of a rank other than local rank 0: it says nothing."""

    events: Events = NoEvents()

    def belongs_to(self, session: str) -> None: ...

    def entered(self, round: RoundReport) -> None: ...

    def committed(self, round: RoundReport) -> None: ...

    def record(self, step: int, values: Mapping[str, MetricValue | None], synced: Sequence[RoundReport]) -> None: ...

    def stepped(
        self,
        step: int,
        learned: StepResult,
        synced: Sequence[RoundReport],
        committed: RunProgress,
        beside: Mapping[str, MetricValue | None],
    ) -> None: ...

    def sampled(self, path: Path) -> None: ...

    def finished(self) -> None: ...

    def exported(self, path: Path, parity: str) -> None: ...


class TrainerReport(NodeReport):
    """The trainer's report on local rank 0: metrics, events, and the console line."""

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
            kind = "unstable" if caution.is_unstable else "caution"
            _log.warning(kind, extra={"fields": {"key": caution.key, "why": caution.why, "way_out": caution.way_out}})
        super().started()

    def entered(self, round: RoundReport) -> None:
        super().entered(round)
        self._uncommitted_tokens = 0
        self._step_from_s = time.monotonic()

    def stepped(
        self,
        step: int,
        learned: StepResult,
        synced: Sequence[RoundReport],
        committed: RunProgress,
        beside: Mapping[str, MetricValue | None],
    ) -> None:
        """Inner step `step` (counted from 1) is done. What an evaluation took is no part of its duration."""
        evaluated_s = float(beside.get("eval/took_s") or 0.0)
        step_s, self._step_from_s = learned.ended_at_s - self._step_from_s - evaluated_s, learned.ended_at_s
        self._uncommitted_tokens += learned.tokens
        if committed.is_now:
            self._uncommitted_tokens = synced[-1].uncommitted_tokens if synced else 0
        rate = learned.tokens / step_s
        values: dict[str, MetricValue | None] = {
            "train/loss": learned.loss,
            "train/perplexity": perplexity(learned.loss),
            "train/lr": learned.lr,
            "train/lr_muon": learned.lr_muon,
            "train/grad_norm": learned.grad_norm,
            "train/tokens": committed.progress.tokens + self._uncommitted_tokens,
            "train/tokens_per_s": rate,
            "train/step_s": step_s,
            "train/data_s": learned.data_s,
            "outer/blocked_s": None if self._node.config.outer is None else learned.blocked_s,
            "train/mfu": None if self._peak_flops is None else rate * self._flops_per_token / self._peak_flops,
            "data/pass": learned.data_pass,
            "node/rss_bytes": resident_bytes(),
            "node/gpu_peak_bytes": _gpu_peak_bytes(self._node.local.device),
            **_source_values(learned.sources),
            **beside,
        }
        if synced:
            values |= _ledger_values(committed.progress.ledgers.values())
        self.record(step, values, synced)

    def sampled(self, path: Path) -> None:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_SAMPLE_CHARS)
        self.events.emit("sample_written", path=str(path), text=text)

    def exported(self, path: Path, parity: str) -> None:
        self.events.emit("model_exported", path=str(path), parity=parity)


def open_report(node: TrainerParts, stack: ExitStack) -> Report:
    """The report of this rank; `stack` says how its part ends, and closes it."""
    if node.local.rank != 0:
        return SilentReport()
    report = TrainerReport(node)
    stack.callback(report.close)
    if node.config.observe.board:
        stack.enter_context(closing(SharedPage(node.config, node.node_dir)))
    report.started()
    stack.push(report.leave)
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


def _gpu_peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
