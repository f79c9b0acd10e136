"""The held-out loss with other parameters than the model's, by which payloads are scored. Main thread of every rank.

Rows are those that `data.hold_out` keeps back of this node's data (with `data.private` its own documents), or else of
`eval.sources`. Nobody trains on them. Each node draws its own for each scored round, as many as its batch has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zeroband.data.loader import Loader
from zeroband.errors import ConfigError
from zeroband.export.evaluation import evaluate
from zeroband.node.mesh import sum_over_ranks
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.evaluation import EvaluationSet, exact_device, holding
from zeroband.runtime.run_rules import scoring_of


class HeldOutScorer:
    """Measures losses on rows that are drawn of `sources`: loaders, and the number of a source in each."""

    def __init__(self, node: TrainerParts, sources: Sequence[tuple[Loader, int]]) -> None:
        self._node = node
        self._sources = sources

    def loss(self, values: Iterable[tuple[str, Tensor]], lot: int) -> float:
        """Return the mean loss in nats per token, the same on all local ranks; NaN where it is not known."""
        node, config = self._node, self._node.config.train
        place, lot = lot % len(self._sources), lot // len(self._sources)
        loader, source = self._sources[place]
        there = loader.n_held_out(source)
        rows = min(config.batch_size, there)
        batches = loader.held_out_batches(rows, config.micro_bs, source, first=lot % (there - rows + 1))
        with holding(node.parameters, values):
            part = evaluate(node.model, batches, None, node.local.device)
        sums = torch.tensor([part.nats, part.targets], dtype=torch.float64, device=exact_device(node))
        sum_over_ranks(sums, node.local)
        nats, targets = sums.tolist()
        return nats / targets if targets else float("nan")


def open_scorer(node: TrainerParts, sets: Sequence[EvaluationSet]) -> HeldOutScorer | None:
    """What scores payloads where the configuration asks for it. `sets`: those that [eval] evaluates on.

    Raises ConfigError where too little text is kept back.
    """
    if scoring_of(node.config) is None:
        return None
    own = [(node.loader, number) for number in range(len(node.loader.dataset.sources))]
    sources = [one for one in [*own, *((other.loader, other.number) for other in sets)] if one[0].n_held_out(one[1])]
    if not sources:
        raise ConfigError(
            f"outer.score: data.hold_out={node.config.data.hold_out:g} keeps no sample back of so short a text; give "
            "more text, or name some in eval.sources"
        )
    kept_back = [one for one in sources if one[0] is node.loader]
    return HeldOutScorer(node, kept_back or sources)
