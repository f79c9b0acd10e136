"""zeroband: elastic pre-training of language models over unreliable machines and ordinary internet links.

`DiLoCoOptimizer` is for your own training loop; the trainer is the command `zeroband train`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zeroband.dropin import DiLoCoOptimizer

__version__ = "0.1.0"
__all__ = ["DiLoCoOptimizer"]


def __getattr__(name: str) -> Any:
    """Import the optimizer on demand, so that commands without torch do not load it."""
    if name == "DiLoCoOptimizer":
        from zeroband.dropin import DiLoCoOptimizer

        return DiLoCoOptimizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
