"""DiLoCo in the user's own loop: an optimizer that takes the outer steps by itself.

Owns what such a loop has in the place of the trainer's model, data and configuration. All that happens between nodes is
what it is for the trainer: the same membership, data path, outer loop, checkpoints and ways to join.
"""

from zeroband.dropin.diloco_optimizer import DiLoCoOptimizer

__all__ = ["DiLoCoOptimizer"]
