"""The [rollback] section: when the run goes back to a checkpoint by itself."""

from __future__ import annotations

from pydantic import Field, PositiveInt

from zeroband.config.section import Section


class RollbackConfig(Section):
    """Going back because of the loss, which the nodes decide once for all of them. Needs [outer] and ckpt.path."""

    on_spike: float | None = Field(default=2.0, gt=1)
    """A round whose loss, over all nodes, is so many times the running mean of the rounds before it. None: never."""
    on_non_finite: bool = True
    """A round in which no node had a finite loss and a finite update; a single such node is left out anyway."""
    skip_data: bool = True
    """The samples learned from since the checkpoint are not learned from again: with the same samples the same nodes
    would repeat every bit. Off: they are, which suffices where the hardware was at fault."""
    most: PositiveInt = 3
    """Times in a row to the same checkpoint; then the run stands still, as after `zeroband ctl pause`."""
