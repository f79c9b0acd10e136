"""An outer algorithm: what a node contributes to a round, and how the outer state steps by what the nodes made of it.

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
    """What both kinds have in common. Built, and called, by all local ranks.

    `parts`: of this node. `config`: the [outer] section. `settings`: the knobs, as `Settings` validated them.
    """

    sections: tuple[str, ...] = (PARAMS,)
    """Names of the buffers that make up the outer state. The first are the parameters; others begin as zeros."""
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
        """What makes the result of a round of the contributions. Called once, when the schedule is built."""
        ...

    def describe(self, plan: RoundPlan, result: Tensor, before: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the verdict says of a result, besides the progress. `before`: the record before it. Local rank 0."""
        return {}

    def describe_founding(self, before: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the founding's verdict says, besides the progress. `before`: the record before it; none at a start."""
        return {}

    def score(self, verdict: Verdict, fragment_index: int) -> tuple[float | None, ...]:
        """Measure the payloads that are drawn of a committed round, before it is applied; as in `Ready.gains`."""
        return ()

    def close(self) -> None:  # noqa: B027
        """Give back what the algorithm holds besides its sections: this trainer ends."""


class Algorithm(AnyAlgorithm):
    """Rounds of many inner steps: `ManySteps` is the schedule. Only `step` has to be written."""

    outer_sgd: OuterSGDConfig | None = None
    """The SGD that `step` is, which eager updates need to know; None: it is something else."""
    sends_parameters = False
    """Contributions are parameters, not differences: they move with the outer ones until they count."""

    @abstractmethod
    def step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        """Take the outer step in place, the `outer_step`-th of these parameters, from 1.

        `outer`: the same part of each section; `result`: of what the nodes made together. All (n,) float32 on CPU; the
        bits must not depend on where a part begins, nor on the processor. It runs under `OneRounding`.
        """
        ...

    def contribute(self, anchor: Tensor, inner: Tensor, out: Tensor) -> float | None:
        """Write what this node contributes of a parameter: by default the pseudo-gradient, anchor - inner.

        `anchor`: the outer parameters that this node trained from; `inner`: its own. All (n,) float32 on CPU. May
        return the largest size of a value that it wrote, infinite or NaN where one is: that spares a look at them.
        """
        return write_difference(anchor, inner, out)

    def compression(self) -> Compression | None:
        """How contributions travel, where they are not averaged as they are; None: in comm.codec, as a mean.

        What encoding leaves out stays on the node and is added to its next contribution.
        """
        return None

    def exchange(self) -> Exchange:
        """The mean of the contributions, as outer.robust says; with a compression, of what their payloads hold."""
        compression = self.compression()
        if compression is None:
            return MeanExchange(self.parts, rule_of(self.config.robust))
        self.local_sections = (*self.local_sections, UNSENT)
        return exchange_of(self.parts, compression)

    def merge(self) -> Merge:
        """What a node does with its own parameters when the outer ones moved: by default what outer.merge says."""
        return build_merge(self.parts, self.config, self.parts.buffers[PARAMS], self.outer_sgd)

    def step_number(self, record: Mapping[str, Any], fragments: int) -> int:
        """Which outer step of its fragment a committed round is, from 1."""
        return (record["progress"]["outer_step"] - 1) // fragments + 1


class StepAlgorithm(AnyAlgorithm):
    """Rounds of one inner step: `EveryStep` is the schedule. All nodes hold one model at every step.

    What the nodes make together of their gradients becomes the gradient of all of them, by which the inner optimizer
    steps.
    """

    overlaps = False
    """Whether a contribution travels while the next step runs, at whose end its result is applied."""

    def exchange(self) -> Exchange:
        return MeanExchange(self.parts, audits=False)

    @abstractmethod
    def contribute(self, exchange: Exchange, round: int) -> bool:
        """Make this node's contribution of the gradients in the model; False on all ranks if it is not finite."""
        ...

    @abstractmethod
    def held(self) -> Mapping[str, Mapping[str, Tensor]]:
        """This rank's shards of each section, by parameter; writing to them writes to the model and its optimizer."""
        ...

    @abstractmethod
    def norm(self, record: Mapping[str, Any] | None) -> float:
        """Norm of the gradient to show for a step. `record`: of the round that it takes, None where it takes none."""
        ...

    def set_gradients(self, result: Tensor, record: Mapping[str, Any], *, inner_step: int) -> None:
        """Put a committed result into the model. `inner_step`: inner steps of the run before that round.

        Where no member had weight there is no gradient at all, and the optimizer leaves parameters and moments alone.
        """
        if record["weight"] == 0:
            self.parts.stepper.zero_grad()
        else:
            self.parts.shards.load(gradient_shards(self.parts.model), result)

    def seek(self, record: Mapping[str, Any]) -> None:
        """Bring the inner optimizer to the place that a verdict stands for."""
        self.parts.stepper.seek(Progress.from_record(record["progress"]).inner_step)
