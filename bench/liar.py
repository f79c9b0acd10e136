"""DiLoCo of whose nodes the last ones lie, for bench/byzantine.py: a custom outer algorithm.

All nodes load the same file and settings; which of them lie follows from their ids, node0, node1, and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from zeroband.config.outer import CustomConfig, OuterSGDConfig
from zeroband.config.section import Section
from zeroband.elastic.rounds.coordinator import Offer
from zeroband.elastic.rounds.exchange import CONTRIBUTION, RESULT, MeanExchange
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.elastic.transport.engine import Encoded
from zeroband.observe.view import node_id_of_member
from zeroband.outer.many_steps import PARAMS, ManySteps
from zeroband.outer.outer_optimizer import OuterSGD
from zeroband.outer.robust import rule_of

MOMENTUM = "momentum"
OUTER = OuterSGDConfig(lr=0.7, momentum=0.6)


class Liar(ManySteps):
    """Outer state: parameters and momentum, as DiLoCo's."""

    sections = (PARAMS, MOMENTUM)
    outer_sgd = OUTER

    class Settings(Section):
        """Who lies, and how."""

        lie: Literal["none", "noise", "flip", "flip x100", "scale", "nan", "copy", "weight"] = "none"
        honest: int = 1
        """Nodes before the first one that lies."""

    def __init__(self, parts: OuterParts, config: CustomConfig, settings: Settings) -> None:
        place = int(node_id_of_member(parts.mesh.member_id).removeprefix("node"))
        self._lie = settings.lie if place >= settings.honest else "none"
        self._optimizer = OuterSGD(OUTER)
        encoded = None
        if self._lie == "nan":  # what is encoded here is refused, so the bytes are written by hand
            size = parts.codec.encoded_size(parts.buffers.numel)
            encoded = Encoded(torch.full((size,), 255, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8))
        exchange = MeanExchange(
            parts.mesh, parts.buffers, parts.feedback, parts.codec, parts.fragments, encoded, rule_of(config.robust)
        )
        super().__init__(parts, config, settings, exchange=exchange)

    def take_step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        self._optimizer.apply(outer[PARAMS], outer[MOMENTUM], result, outer_step=outer_step)

    def contribute(self, turn: int) -> bool:
        is_finite = super().contribute(turn)
        own = self._buffers[CONTRIBUTION]
        match self._lie:
            case "noise":
                noise = torch.randn(own.numel())
                own.copy_(noise * (100 * own.norm() / noise.norm()))
            case "flip":
                own.neg_()
            case "flip x100":
                own.mul_(-100)
            case "scale":
                own.mul_(100)
            case "copy":  # of what the others came to in the last round, since theirs of this one are sealed
                own.copy_(self._buffers[RESULT])
            case _:
                pass
        return is_finite

    def _offer(self, **said: Any) -> Offer:
        offer = super()._offer(**said)
        object.__setattr__(offer, "weight", offer.weight * (1000 if self._lie == "weight" else 1))
        return offer


ALGORITHM = Liar
