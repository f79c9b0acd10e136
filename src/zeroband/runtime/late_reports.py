"""What inner steps showed, told when the next one was given to the device, which so always has work. Main thread."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.rounds.interfaces import SyncHooks
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import Leaving
from zeroband.node.async_copy import Reading
from zeroband.observe.log import get_logger
from zeroband.observe.metrics import MetricValue
from zeroband.runtime.report import Report, RunProgress, SourceResult, StepResult

_log = get_logger(__name__)


@dataclass(kw_only=True)
class InnerStep:
    """An inner step that was given to the device, and what its hooks did. Over all ranks of the node."""

    number: int
    """Counted from 0."""
    lr: float
    lr_muon: float | None = None
    tokens: int
    """Targets."""
    data_s: float
    data_pass: int
    shown: Reading
    """Norm of the gradient; cross entropy of the targets in nats, summed up: of all, and of each source where known."""
    sources: Mapping[str, SourceResult] = field(default_factory=dict[str, SourceResult])
    """Without losses yet."""
    blocked_s: float = 0.0
    synced: Sequence[RoundReport] = ()
    committed: RunProgress | None = None
    beside: Mapping[str, MetricValue | None] = field(default_factory=dict[str, MetricValue | None])
    """What checkpoints and an evaluation measured."""


def mean_of(nats: float, tokens: int) -> float:
    """The loss of an inner step; NaN where it has no targets."""
    return nats / tokens if tokens else math.nan


class LateReports:
    """Tells outer algorithm and report of each inner step, one step late and in order; at a boundary, at once.

    As a context: tells of the last step at the end, too.
    """

    def __init__(self, outer: SyncHooks, report: Report, departure: Departure) -> None:
        self._outer = outer
        self._report = report
        self._departure = departure
        self._late: InnerStep | None = None

    def __enter__(self) -> LateReports:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Leaving):
            self._tell_late()

    def learn(self, made: InnerStep) -> None:
        """Tell the algorithm of all steps up to this one, before the hook of a boundary. Waits for the device."""
        self._tell_late()
        self._learn(made)

    def end(self, made: InnerStep, *, is_late: bool) -> None:
        """The hooks of a step were called. `is_late`: it is told of with the next one."""
        if is_late:
            self._tell_late()
            self._late = made
        else:
            self._tell(made, ended_at_s=time.monotonic())

    def _tell_late(self) -> None:
        made, self._late = self._late, None
        if made is not None:
            self._learn(made)
            self._tell(made, ended_at_s=made.shown.ready_at_s)

    def _learn(self, made: InnerStep) -> None:
        if not self._outer.has_own_steps:  # told with the gradient
            return
        with self._departure.in_step():
            norm, nats, *_ = made.shown.read()
        loss, is_finite = mean_of(nats, made.tokens), math.isfinite(norm)
        if not is_finite:
            fields = {"step": made.number, "norm": norm, "loss": loss}
            _log.warning("the gradient of an inner step is not finite, so it is left out", extra={"fields": fields})
        self._outer.learned(made.tokens if is_finite else 0, loss)

    def _tell(self, made: InnerStep, *, ended_at_s: float) -> None:
        norm, nats, *each = made.shown.read()
        learned = StepResult(
            loss=mean_of(nats, made.tokens),
            tokens=made.tokens,
            lr=made.lr,
            lr_muon=made.lr_muon,
            grad_norm=norm,
            data_s=made.data_s,
            blocked_s=made.blocked_s,
            data_pass=made.data_pass,
            ended_at_s=ended_at_s,
            sources=_with_losses(made.sources, each),
        )
        assert made.committed is not None, "its hooks come first"
        self._report.stepped(made.number + 1, learned, made.synced, made.committed, made.beside)


def _with_losses(sources: Mapping[str, SourceResult], nats: Sequence[float]) -> Mapping[str, SourceResult]:
    """Give each source its mean loss. `nats`: summed up over its targets; empty where they are not known."""
    if not nats:
        return sources
    read = zip(sources.items(), nats, strict=True)
    return {name: replace(one, loss=each / one.tokens if one.tokens else None) for (name, one), each in read}
