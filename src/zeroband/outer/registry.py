"""Which algorithm a configuration asks for: the one list of them."""

from __future__ import annotations

from zeroband.config.outer import (
    CustomConfig,
    DdpConfig,
    DemoConfig,
    DilocoConfig,
    Outer,
    RoundsConfig,
    SparseLocoConfig,
)
from zeroband.elastic.rounds.interfaces import OuterAlgorithm, OuterParts
from zeroband.outer.custom import load_algorithm, require_robust
from zeroband.outer.ddp import Ddp
from zeroband.outer.demo import Demo
from zeroband.outer.diloco import DiLoCo
from zeroband.outer.sparseloco import SparseLoCo


def build_algorithm(parts: OuterParts, config: Outer, *, clip_norm: float | None) -> OuterAlgorithm:
    """The algorithm of an [outer] section. `clip_norm`: of gradients, for those that see them."""
    match config:
        case DilocoConfig():
            return DiLoCo(parts, config)
        case SparseLocoConfig():
            return SparseLoCo(parts, config)
        case DdpConfig():
            return Ddp(parts, clip_norm=clip_norm)
        case DemoConfig():
            return Demo(parts, config, clip_norm=clip_norm)
        case CustomConfig():
            custom = load_algorithm(config)
            built = custom.build(parts, config, custom.settings)
            require_robust(config, built)
            return built


def are_rounds_steps(config: Outer | None) -> bool:
    """Whether a round is one inner step; None: of a node alone, whose rounds are. Raises what `load_algorithm` does."""
    if isinstance(config, CustomConfig):
        return load_algorithm(config).is_every_step
    return not isinstance(config, RoundsConfig)
