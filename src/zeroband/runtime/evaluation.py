"""Held-out losses during training: of the outer parameters at the ends of rounds, and of payloads for scoring.

Main thread of every rank. Leaves the training state bit-identical: the model's own parameters are restored afterwards.

Payloads are scored on this node's rows that `data.hold_out` keeps back (with `data.private` its own documents), or else
on `eval.sources`. No node trains on them. Each node draws one batch per scored round.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zeroband.config.evaluation import EvalConfig
from zeroband.data.dataset import open_dataset
from zeroband.data.loader import Loader, MicroBatch
from zeroband.elastic.membership.progress import Progress
from zeroband.errors import ConfigError
from zeroband.export.evaluation import Evaluation, evaluate
from zeroband.node.mesh import all_ok, sum_over_ranks
from zeroband.node.sharding import Parameters
from zeroband.observe.events import Events
from zeroband.observe.metrics import MetricValue
from zeroband.runtime.build import TrainerParts, loader_of
from zeroband.runtime.node_parts import TrainingRun
from zeroband.runtime.run_rules import scoring_of
from zeroband.state.flat import FlatLayout, ShardMap, parameter_shards

NOT_MIXED: Mapping[str, float] = {}

USUAL_BATCHES = 8
"""Batches per set without `eval.batches`."""

_OWN = ("eval/loss", "eval/bits_per_byte", "eval/tokens")
_OF_SOURCE = ("eval/loss/<source>", "eval/bits_per_byte/<source>", "eval/tokens/<source>")
"""Metric names, in the same order."""


@dataclass(frozen=True)
class EvaluationSet:
    """A fixed set of samples to evaluate on."""

    source: str | None
    """Name in eval.sources or data.sources; None: the held-out samples of the run's only source."""
    loader: Loader
    samples: int
    number: int = 0
    """Index of the source in the loader."""


class Evaluations:
    """The evaluations of a training loop; this base class, for runs without [eval], makes none. All local ranks."""

    def is_due(self, before: Progress, after: Progress) -> bool:
        """Whether the round between these two points of progress calls for an evaluation."""
        return False

    def run(self, step: int) -> Mapping[str, MetricValue | None]:
        """Evaluate the outer parameters after inner step `step`, and return the metrics."""
        return {}


class HeldOutEvaluations(Evaluations):
    """The evaluations that [eval] asks for."""

    def __init__(
        self, node: TrainerParts, run: TrainingRun, sets: Iterable[EvaluationSet], every_steps: int, events: Events
    ) -> None:
        self._node = node
        self._run = run
        self._sets = tuple(sets)
        self._every_steps = every_steps
        self._events = events
        self._text_bytes: dict[str | None, int] = {}
        """Text bytes of each set, counted once."""
        self._is_cut_short = False
        """Whether the node was asked to leave during the latest evaluation."""
        layout = FlatLayout.of(node.parameters)
        self._shards = ShardMap.of(layout, node.parameters, node.local)

    def is_due(self, before: Progress, after: Progress) -> bool:
        reached = after.inner_step // self._every_steps > before.inner_step // self._every_steps
        return reached or (after.is_complete and not before.is_complete)

    def run(self, step: int) -> Mapping[str, MetricValue | None]:
        """Evaluate the outer parameters; returns no metrics if the node is asked to leave meanwhile."""
        from_s = time.monotonic()
        outer, names = self._run.outer_parameters, [name for name, _ in self._node.parameters.named_parameters()]
        wanted = () if outer is None else self._shards.held(outer, names)
        with swapped_parameters(self._node.parameters, wanted), self._node.departure.in_step():
            results = {one.source: self._evaluate(one) for one in self._sets}
        whole = {source: result for source, result in results.items() if result is not None}
        if len(whole) < len(self._sets):
            return {}
        weights = {one.name: one.weight for one in self._node.config.data.sources}
        values = metrics_of(whole, weights) | {"eval/step": step, "eval/took_s": time.monotonic() - from_s}
        self._events.emit("evaluated", **_fields_of(step, whole, values))
        return values

    def _evaluate(self, one: EvaluationSet) -> Evaluation | None:
        """Evaluate one set over all ranks; returns None on all of them if this node is asked to leave meanwhile."""
        node, is_counted = self._node, one.source in self._text_bytes
        batches = one.loader.held_out_batches(one.samples, node.config.train.micro_bs, one.number)
        self._is_cut_short = False
        part = evaluate(
            node.model, self._until_leaving(batches), None if is_counted else node.tokenizer, node.local.device
        )
        if self._is_cut_short:
            return None
        samples, targets, text_bytes, nats = _summed(node, part.samples, part.targets, part.text_bytes, part.nats)
        text_bytes = self._text_bytes.setdefault(one.source, int(text_bytes))
        return replace(part, samples=int(samples), targets=int(targets), text_bytes=text_bytes, nats=nats)

    def _until_leaving(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the batches until a rank is to leave, and show with each that the node is alive."""
        for batch in batches:
            self._run.show_progress()
            self._is_cut_short = not all_ok(not self._node.departure.is_urgent, self._node.local)
            if self._is_cut_short:
                return
            yield batch


@contextmanager
def swapped_parameters(model: Parameters, wanted: Iterable[tuple[str, Tensor]]) -> Generator[None]:
    """Give a model other parameters, and restore its own ones bit for bit.

    `wanted`: name and (n,) float32 of this rank's part of a parameter. Copies only those that differ: 4 bytes a value,
    on the model's device.
    """
    own, shards = dict[str, Tensor](), parameter_shards(model)
    try:
        for name, part in wanted:
            held, value = shards[name].detach().view(-1), part.to(shards[name].device)
            if not torch.equal(held, value):
                own[name] = held.clone()
                held.copy_(value)
        yield
    finally:
        for name, value in own.items():
            shards[name].detach().view(-1).copy_(value)


def metrics_of(
    results: Mapping[str | None, Evaluation], weights: Mapping[str, float] = NOT_MIXED
) -> dict[str, MetricValue | None]:
    """Return results under their names in metrics.jsonl; those of a source carry its name.

    With `weights`, those of data.sources, the total is the weighted mean of the mixture's sources.
    """
    values: dict[str, MetricValue | None] = {}
    if weights:
        own = [(weight, results[name]) for name, weight in weights.items()]
        total = sum(weights.values())
        values["eval/loss"] = sum(weight * result.loss for weight, result in own) / total
        if all(result.text_bytes for _, result in own):
            values["eval/bits_per_byte"] = sum(weight * result.bits_per_byte for weight, result in own) / total
        values["eval/tokens"] = sum(result.targets for _, result in own)
    for source, result in results.items():
        measured = (result.loss, result.bits_per_byte if result.text_bytes else None, result.targets)
        names = _OWN if source is None else [name.replace("<source>", source) for name in _OF_SOURCE]
        values.update(zip(names, measured, strict=True))
    return values


def _fields_of(
    step: int, results: Mapping[str | None, Evaluation], values: Mapping[str, MetricValue | None]
) -> dict[str, object]:
    by_source = {source: round(result.loss, 6) for source, result in results.items() if source is not None}
    return {
        "step": step,
        "loss": values.get("eval/loss"),
        "bits_per_byte": values.get("eval/bits_per_byte"),
        "by_source": by_source,
        "took_s": values["eval/took_s"],
    }


def _summed(node: TrainerParts, *values: float) -> list[float]:
    """Return the sum of each value over the ranks, in float64."""
    device = node.local.device if node.local.world_size > 1 else torch.device("cpu")  # of the collective
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    sum_over_ranks(sums, node.local)
    return sums.tolist()


# -- evaluation sets ------------------------------------------------------------------------------------------------


def open_evaluation_sets(node: TrainerParts) -> list[EvaluationSet]:
    """Open the sets that [eval] asks for, tokenising text if needed. Called by all local ranks.

    Raises ConfigError if there is no such text, or less than asked for.
    """
    wanted = node.config.eval
    if wanted is None:
        return []
    sets: list[EvaluationSet] = []
    rank, world_size = node.local.local_rank, node.local.ranks_here
    if node.config.data.hold_out:
        for number, own in enumerate(node.loader.dataset.sources):
            sets.append(_set_of(node, wanted, own.name or None, node.loader, number))
    for source, data in wanted.data_of(node.config.data).items():
        try:
            dataset = open_dataset(
                data, node.config.run.seed, local_rank=rank, local_world_size=world_size, evaluation_only=True
            )
        except ConfigError as error:
            raise ConfigError(f"eval.sources, {source}: {error}") from error
        loader = loader_of(dataset, data, node.config.train, node.local)
        sets.append(_set_of(node, wanted, source, loader))
    return sets


def _set_of(
    node: TrainerParts, wanted: EvalConfig, source: str | None, loader: Loader, number: int = 0
) -> EvaluationSet:
    size, there = node.config.train.batch_size, loader.n_held_out(number)
    is_own = loader is node.loader
    if not there:
        named = "data.source" if source is None else f"{source} of data.sources"
        raise ConfigError(
            f"[eval]: data.hold_out={node.config.data.hold_out:g} keeps no sample back of so short a text; add text to "
            f"{named}"
        )
    if wanted.batches is None:
        return EvaluationSet(source, loader, min(USUAL_BATCHES * size, there), number)
    samples = wanted.batches * size
    if there < samples:
        of_source = f" of {source}" if source else ""
        what = f"data.hold_out keeps back{of_source}" if is_own else f"{source} of eval.sources has"
        raise ConfigError(
            f"eval.batches={wanted.batches} asks for {samples} samples (train.batch_size={size}) and {what} {there}; "
            "lower it, remove it to take all samples, or add text"
        )
    return EvaluationSet(source, loader, samples, number)


# -- scored payloads -------------------------------------------------------------------------------------------------


class HeldOutScorer:
    """Measures losses on drawn rows of `sources`: loaders, and the index of a source in each."""

    def __init__(self, node: TrainerParts, sources: Sequence[tuple[Loader, int]]) -> None:
        self._node = node
        self._sources = sources

    def loss(self, values: Iterable[tuple[str, Tensor]], lot: int) -> float:
        """Return the mean loss in nats per token, equal on all local ranks; NaN if unknown."""
        node, config = self._node, self._node.config.train
        place, lot = lot % len(self._sources), lot // len(self._sources)
        loader, source = self._sources[place]
        there = loader.n_held_out(source)
        rows = min(config.batch_size, there)
        batches = loader.held_out_batches(rows, config.micro_bs, source, first=lot % (there - rows + 1))
        with swapped_parameters(node.parameters, values):
            part = evaluate(node.model, batches, None, node.local.device)
        nats, targets = _summed(node, part.nats, part.targets)
        return nats / targets if targets else float("nan")


def open_scorer(node: TrainerParts, sets: Sequence[EvaluationSet]) -> HeldOutScorer | None:
    """Open the scorer of payloads if the configuration asks for one. `sets`: those of [eval].

    Raises ConfigError if too little text is kept back.
    """
    if scoring_of(node.config) is None:
        return None
    own = [(node.loader, number) for number in range(len(node.loader.dataset.sources))]
    sources = [one for one in [*own, *((other.loader, other.number) for other in sets)] if one[0].n_held_out(one[1])]
    if not sources:
        raise ConfigError(
            f"outer.score: data.hold_out={node.config.data.hold_out:g} keeps no sample back of so short a text; add "
            "text, or name some in eval.sources"
        )
    kept_back = [one for one in sources if one[0] is node.loader]
    return HeldOutScorer(node, kept_back or sources)
