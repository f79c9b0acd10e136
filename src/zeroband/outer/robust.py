"""The robust combination rule that a configuration selects."""

from __future__ import annotations

from zeroband.config.outer import CenteredClipConfig, ClipConfig, TrimmedConfig
from zeroband.kernels.robust import RobustRule


def rule_of(config: ClipConfig | TrimmedConfig | CenteredClipConfig | None) -> RobustRule | None:
    """None: the weighted mean."""
    match config:
        case None:
            return None
        case TrimmedConfig():
            return RobustRule(config.type, trim=config.trim)
        case CenteredClipConfig():
            return RobustRule(config.type, iterations=config.iterations)
        case ClipConfig():
            return RobustRule(config.type)
