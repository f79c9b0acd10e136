"""Builds the algorithm that a config asks for; the only list of algorithms."""

from __future__ import annotations

from typing import Any

from zeroband.config.outer import (
    CustomConfig,
    DdpConfig,
    DemoConfig,
    DilocoConfig,
    Outer,
    RoundsConfig,
    SparseLocoConfig,
)
from zeroband.elastic.rounds.interfaces import OuterParts
from zeroband.outer.algorithm import Algorithm, AnyAlgorithm, StepAlgorithm
from zeroband.outer.custom import load_algorithm, require_robust
from zeroband.outer.ddp import Ddp
from zeroband.outer.demo import Demo
from zeroband.outer.diloco import DiLoCo
from zeroband.outer.every_step import EveryStep
from zeroband.outer.many_steps import ManySteps
from zeroband.outer.schedule import Schedule
from zeroband.outer.sparseloco import SparseLoCo


def build_schedule(parts: OuterParts, config: Outer, *, clip_norm: float | None) -> Schedule[Any]:
    """Build the schedule of an [outer] section. `clip_norm`: of gradients, for algorithms that see them."""
    schedule = schedule_of(parts, config, _algorithm(parts, config, clip_norm))
    if isinstance(config, CustomConfig):
        require_robust(config, schedule.exchange)
    return schedule


def schedule_of(parts: OuterParts, config: Outer, algorithm: AnyAlgorithm) -> Schedule[Any]:
    """Build the schedule of an algorithm."""
    if isinstance(algorithm, StepAlgorithm):
        return EveryStep(parts, algorithm)
    assert isinstance(algorithm, Algorithm) and isinstance(config, RoundsConfig)
    return ManySteps(parts, algorithm, config)


def _algorithm(parts: OuterParts, config: Outer, clip_norm: float | None) -> AnyAlgorithm:
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
            return custom.build(parts, config, custom.settings)


def are_rounds_steps(config: Outer | None) -> bool:
    """Whether a round is one inner step, as for a single node (None). Raises like `load_algorithm`."""
    if isinstance(config, CustomConfig):
        return load_algorithm(config).is_every_step
    return not isinstance(config, RoundsConfig)
