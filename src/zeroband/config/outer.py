"""The [outer] section: how nodes synchronise, one tagged variant for each algorithm."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from zeroband.config.section import NODE_LOCAL, Section


class OuterSGDConfig(Section):
    """SGD with momentum on pseudo-gradients."""

    lr: PositiveFloat = 0.7
    """Outer learning rate."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Outer momentum."""
    nesterov: bool = True
    """Nesterov form, as torch.optim.SGD(nesterov=True, dampening=0); without momentum it makes no difference."""
    momentum_warmup_rounds: int = Field(default=0, ge=0)
    """Outer steps over which the momentum grows linearly: avoids an excursion of the loss in the first rounds."""


class DdpConfig(Section):
    """Gradients are averaged at every step."""

    type: Literal["ddp"]


class DilocoConfig(Section):
    """Many inner steps on each node, then one outer step."""

    type: Literal["diloco"]
    inner_steps: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Inner steps of this node between two outer steps (H in arXiv:2311.08105); more of them: less traffic, staler
    averages. A slower node may do fewer. None: 500, or as many as fit into inner_seconds."""
    inner_seconds: PositiveFloat | None = None
    """Time between two outer steps, so that a node at a third of the speed does a third of the steps and nobody waits.
    None: inner_steps alone decides."""
    straggler_deadline_s: PositiveFloat | None = None
    """When half of the nodes have waited so long for the others, they go without them; what those learn goes into a
    later round. None: they wait for every node that is alive."""
    optimizer: OuterSGDConfig = OuterSGDConfig()
    """The outer optimizer; with lr 1 and momentum 0 the outer step is the plain mean of the nodes' parameters."""

    @property
    def most_inner_steps(self) -> int:
        """The limit of a round in inner steps."""
        return self.inner_steps or (500 if self.inner_seconds is None else 1_000_000)


Outer = Annotated[DdpConfig | DilocoConfig, Field(discriminator="type")]
