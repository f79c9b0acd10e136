"""Outer algorithms: how a node makes its contribution, and how the outer state steps by the combined result.

`Algorithm` is for rounds of many inner steps, `StepAlgorithm` for rounds of one. Neither knows members, votes or
retries: a schedule (`ManySteps`, `EveryStep`) calls them. A joiner that replays a round takes the same step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zeroband.config.outer import OuterSGDConfig
from zeroband.config.section import Section
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import RoundPlan, Verdict
from zeroband.elastic.rounds.exchange import Exchange, MeanExchange
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.kernels.host_passes import write_difference
from zeroband.outer.custom_compression import UNSENT, Compression, exchange_of
from zeroband.outer.merge import Merge, build_merge
from zeroband.outer.robust import rule_of
from zeroband.state.flat import gradient_shards

PARAMS = "params"
"""The section that holds the parameters."""


class AnyAlgorithm(ABC):
    """Base of both kinds. Built and called by all local ranks.

    `parts`: of this node. `config`: the [outer] section. `settings`: an instance of `Settings`.
    """

    sections: tuple[str, ...] = (PARAMS,)
    """Names of the buffers that make up the outer state. The first holds the parameters; others start as zeros."""
    local_sections: tuple[str, ...] = ()
    """Names of the buffers that only this node has; saved with its inner optimizer."""
    has_moments = False
    """Whether the outer state holds the inner optimizer's moments."""
    Settings: type[Section] = Section
    """Knobs of a user's algorithm, set by outer.settings."""

    def __init__(self, parts: OuterParts, config: Any = None, settings: Any = None) -> None:
        self.parts = parts
        self.config = config
        self.settings = settings

    @abstractmethod
    def exchange(self) -> Exchange:
        """Build the exchange, which combines contributions. Called once, when the schedule is built."""
        ...

    def describe(self, plan: RoundPlan, result: Tensor, before: Mapping[str, Any]) -> Mapping[str, Any]:
        """Entries of the verdict's record, besides the progress. `before`: the previous record. Local rank 0."""
        return {}

    def describe_founding(self, before: Mapping[str, Any]) -> Mapping[str, Any]:
        """Entries of the founding verdict's record, besides the progress. `before`: the previous record, if any."""
        return {}

    def score(self, verdict: Verdict, fragment_index: int) -> tuple[float | None, ...]:
        """Measure the drawn payloads of a committed round before it is applied; returns `Ready.gains`."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Free resources other than the sections when the trainer ends."""


class Algorithm(AnyAlgorithm):
    """Rounds of many inner steps, scheduled by `ManySteps`. Only `step` has to be written."""

    outer_sgd: OuterSGDConfig | None = None
    """Settings of `step` if it is SGD, as eager updates need; None: it is not."""
    sends_parameters = False
    """Contributions are parameters, not differences: they are shifted with the outer ones until they count."""

    @abstractmethod
    def step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        """Take the outer step in place, the `outer_step`-th of these parameters, from 1.

        `outer`: a slice of each section; `result`: the same slice of the round's result. All (n,) float32 on CPU; the
        bits must not depend on where a slice begins, nor on the processor. Runs under `OneRounding`.
        """
        ...

    def contribute(self, anchor: Tensor, inner: Tensor, out: Tensor) -> float | None:
        """Write this node's contribution of a parameter: by default the pseudo-gradient, anchor - inner.

        `anchor`: the outer parameters that this node trained from; `inner`: its own. All (n,) float32 on CPU. May
        return the largest absolute value written (inf or NaN if there is one), which saves a pass over the values.
        """
        return write_difference(anchor, inner, out)

    def compression(self) -> Compression | None:
        """Compression of contributions; None: they are encoded by comm.codec and averaged.

        The encoding error stays on the node and is added to its next contribution.
        """
        return None

    def exchange(self) -> Exchange:
        """Build the mean of contributions, or outer.robust's combination; with a compression, of decoded payloads."""
        compression = self.compression()
        if compression is None:
            return MeanExchange(self.parts, rule_of(self.config.robust))
        self.local_sections = (*self.local_sections, UNSENT)
        return exchange_of(self.parts, compression)

    def merge(self) -> Merge:
        """Build the merge of a node's own parameters with the outer ones: by default as outer.merge says."""
        return build_merge(self.parts, self.config, self.parts.buffers[PARAMS], self.outer_sgd)

    def step_number(self, record: Mapping[str, Any], fragments: int) -> int:
        """Number of a committed round among the outer steps of its fragment, from 1."""
        return (record["progress"]["outer_step"] - 1) // fragments + 1


class StepAlgorithm(AnyAlgorithm):
    """Rounds of one inner step, scheduled by `EveryStep`. All nodes hold the same model at every step.

    The combination of the nodes' gradients becomes the gradient of each node's inner optimizer step.
    """

    overlaps = False
    """Whether the exchange overlaps the next step, at whose end the result is applied."""

    def exchange(self) -> Exchange:
        return MeanExchange(self.parts, audits=False)

    @abstractmethod
    def contribute(self, exchange: Exchange, round: int) -> bool:
        """Contribute the model's gradients; False on all ranks if they are not finite."""
        ...

    @abstractmethod
    def held(self) -> Mapping[str, Mapping[str, Tensor]]:
        """This rank's shards of each section, by parameter; writing to them writes to the model and its optimizer."""
        ...

    @abstractmethod
    def norm(self, record: Mapping[str, Any] | None) -> float:
        """Gradient norm to report for a step. `record`: of the round that it applies; None: it applies none."""
        ...

    def set_gradients(self, result: Tensor, record: Mapping[str, Any], *, inner_step: int) -> None:
        """Put a committed result into the model. `inner_step`: inner steps of the run before that round.

        If no member had weight there is no gradient, and the optimizer changes neither parameters nor moments.
        """
        if record["weight"] == 0:
            self.parts.stepper.zero_grad()
        else:
            self.parts.shards.load(gradient_shards(self.parts.model), result)

    def seek(self, record: Mapping[str, Any]) -> None:
        """Set the inner optimizer to the inner step of a verdict's record."""
        self.parts.stepper.seek(Progress.from_record(record["progress"]).inner_step)
