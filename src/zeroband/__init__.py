"""zeroband: elastic pre-training of language models over unreliable machines and ordinary internet links.

`DiLoCoOptimizer` is for a training loop of one's own; the trainer is the command `zeroband train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroband.dropin import DiLoCoOptimizer

__version__ = "0.1.0"
__all__ = ["DiLoCoOptimizer"]


def __getattr__(name: str) -> Any:
    """The optimizer, when somebody asks for it: a command that needs no torch does not load it."""
    if name == "DiLoCoOptimizer":
        from zeroband.dropin import DiLoCoOptimizer

        return DiLoCoOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
