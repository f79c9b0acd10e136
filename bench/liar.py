"""DiLoCo of whose nodes the last ones lie, for bench/byzantine.py: a custom outer algorithm.

All nodes load the same file and settings; which of them lie follows from their ids, node0, node1, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from zeroband.config.outer import CustomConfig, OuterSGDConfig
from zeroband.config.section import Section
from zeroband.elastic.rounds.exchange import Exchange, MeanExchange
from zeroband.elastic.rounds.interfaces import CONTRIBUTION, RESULT, OuterParts
from zeroband.elastic.transport.engine import Encoded
from zeroband.kernels.robust import RobustRule
from zeroband.observe.view import node_id_of_member
from zeroband.outer.algorithm import PARAMS, Algorithm
from zeroband.outer.outer_optimizer import OuterSGD
from zeroband.outer.robust import rule_of

MOMENTUM = "momentum"
OUTER = OuterSGDConfig(lr=0.7, momentum=0.6)


class Liar(Algorithm):
    """Outer state: parameters and momentum, as DiLoCo's."""

    sections = (PARAMS, MOMENTUM)
    outer_sgd = OUTER

    class Settings(Section):
        """Who lies, and how."""

        lie: Literal["none", "noise", "flip", "flip x100", "scale", "nan", "copy", "weight"] = "none"
        honest: int = 1
        """Nodes before the first one that lies."""

    def __init__(self, parts: OuterParts, config: CustomConfig, settings: Settings) -> None:
        super().__init__(parts, config, settings)
        place = int(node_id_of_member(parts.mesh.member_id).removeprefix("node"))
        self._lie = settings.lie if place >= settings.honest else "none"
        self._optimizer = OuterSGD(OUTER)
        if self._lie == "weight":
            announce = parts.mesh.announce_ready
            parts.mesh.announce_ready = lambda ready: announce(replace(ready, weight=1000 * ready.weight))

    def step(self, outer: Mapping[str, Tensor], result: Tensor, *, outer_step: int) -> None:
        self._optimizer.apply(outer[PARAMS], outer[MOMENTUM], result, outer_step=outer_step)

    def exchange(self) -> Exchange:
        return LyingExchange(self.parts, self._lie, rule_of(self.config.robust))


class LyingExchange(MeanExchange):
    """A mean to which this node does not contribute what it learned."""

    def __init__(self, parts: OuterParts, lie: str, rule: RobustRule | None) -> None:
        encoded = None
        if lie == "nan":  # what is encoded here is refused, so the bytes are written by hand
            size = parts.codec.encoded_size(parts.buffers.numel)
            encoded = Encoded(torch.full((size,), 255, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8))
        super().__init__(parts, rule, encoded=encoded)
        self._lie = lie
        self._buffers = parts.buffers

    def load(
        self, round: int, fragment_index: int, names: Collection[str], sizes: Mapping[str, float | None] | None = None
    ) -> bool:
        is_finite = super().load(round, fragment_index, names, sizes)
        own, common = self._buffers[CONTRIBUTION], self._buffers[RESULT]
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
                own.copy_(common)
            case _:
                pass
        return is_finite


ALGORITHM = Liar
