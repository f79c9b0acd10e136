"""Turns what the parts returned into metrics and events. Local rank 0 only; the other ranks hold None in its place."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zeroband.config.cautions import cautions_of
from zeroband.config.model_size import flops_per_token, parameter_count
from zeroband.data.ledger import Ledger
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.interfaces import RoundReport
from zeroband.observe.hardware import peak_flops, resident_bytes
from zeroband.observe.log import get_logger
from zeroband.observe.metrics import MetricValue, perplexity
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.report import NodeReport

_log = get_logger(__name__)


@dataclass(frozen=True)
class Learned:
    """What one inner step showed, summed over the node's ranks."""

    loss: float
    """Mean cross entropy in nats per token."""
    tokens: int
    lr: float
    grad_norm: float
    data_s: float
    blocked_s: float
    """In which training stood still for the outer algorithm."""


@dataclass(frozen=True)
class Committed:
    """The run after its newest committed round."""

    progress: Progress
    is_now: bool
    """Whether that round ended with the step that is reported."""


class Report(NodeReport):
    """What the trainer tells of its node."""

    def __init__(self, node: TrainerParts) -> None:
        config, vocab_size = node.config, node.tokenizer.padded_vocab_size
        parameters = parameter_count(config.model, vocab_size)
        super().__init__(node, parameters=parameters, total_steps=config.train.total_steps)
        self._trainer = node
        self._flops_per_token = flops_per_token(config.model, vocab_size, config.data.seq_length)
        peak = peak_flops(node.local.device)
        self._peak_flops = None if peak is None else peak * min(node.local.world_size, torch.cuda.device_count())
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
        learned: Learned,
        synced: Sequence[RoundReport],
        committed: Committed,
        checkpoints: Mapping[str, MetricValue | None],
    ) -> None:
        """Inner step `step` (counted from 1) is done."""
        now_s = time.monotonic()
        step_s, self._step_from_s = now_s - self._step_from_s, now_s
        self._uncommitted_tokens += learned.tokens
        if committed.is_now:
            self._uncommitted_tokens = synced[-1].uncommitted_tokens if synced else 0
        rate = learned.tokens / step_s
        values: dict[str, MetricValue | None] = {
            "train/loss": learned.loss,
            "train/perplexity": perplexity(learned.loss),
            "train/lr": learned.lr,
            "train/grad_norm": learned.grad_norm,
            "train/tokens": committed.progress.tokens + self._uncommitted_tokens,
            "train/tokens_per_s": rate,
            "train/step_s": step_s,
            "train/data_s": learned.data_s,
            "outer/blocked_s": None if self._node.config.outer is None else learned.blocked_s,
            "train/mfu": None if self._peak_flops is None else rate * self._flops_per_token / self._peak_flops,
            "data/pass": self._trainer.loader.data_pass,
            "node/rss_bytes": resident_bytes(),
            "node/gpu_peak_bytes": _gpu_peak_bytes(self._node.local.device),
            **checkpoints,
        }
        if synced:
            values |= _ledger_values(committed.progress.ledger)
        self.record(step, values, synced)

    def sampled(self, path: Path) -> None:
        self.events.emit("sample_written", path=str(path))

    def exported(self, path: Path, parity: str) -> None:
        self.events.emit("model_exported", path=str(path), parity=parity)


def _ledger_values(ledger: Ledger) -> dict[str, MetricValue | None]:
    return {
        "data/next": ledger.next,
        "data/returned_samples": sum(stop - start for start, stop in ledger.returned),
    }


def _gpu_peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
