"""DiLoCo in the user's own loop: an optimizer that includes the outer steps.

Replaces the trainer's model, data and configuration. Everything between nodes is the trainer's: membership, data path,
outer loop, checkpoints and joins.
"""

from zeroband.dropin.diloco_optimizer import DiLoCoOptimizer

__all__ = ["DiLoCoOptimizer"]
