"""What a rank keeps in its GPU's memory during a step, where the configuration leaves it open: rules on sizes. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from zeroband.config.training import TrainConfig

_STATE_BYTES = 16
"""Parameter, gradient and two moments in float32, for each parameter that a rank holds."""

_COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}
_GRADIENT_BYTES = 4
_FOR_STATE_AND_COPIES = 0.6
"""Share of a GPU's memory that is given away here; activations, the loss and what moves between ranks get the rest."""


@dataclass(frozen=True)
class Placement:
    """What stays in memory between the passes of a step."""

    reshard_after_forward: bool
    """Gathered parameters are freed after a forward pass, and gathered again for the backward pass."""
    reduces_micro_batches: bool
    """Gradients are reduced into shards with every micro-batch, not once with the last one."""


def placement(train: TrainConfig, *, params: int, ranks: int, gpu_bytes: int | None) -> Placement:
    """Decide for a model of `params` values on `ranks` GPUs of so many bytes each; None: on a CPU.

    What the configuration says is done. What it leaves open is kept where it fits: gathered parameters first, since
    each micro-batch would gather them twice, then whole gradients.
    """
    if gpu_bytes is None:
        keeps_parameters, keeps_gradients = False, True
    else:
        room = _FOR_STATE_AND_COPIES * gpu_bytes - params * _STATE_BYTES / ranks
        room_after = room - params * _COMPUTE_BYTES[train.dtype]
        keeps_parameters, keeps_gradients = room_after >= 0, room_after >= params * _GRADIENT_BYTES
    return Placement(
        not keeps_parameters if train.reshard_after_forward is None else train.reshard_after_forward,
        not keeps_gradients if train.reduce_gradients is None else train.reduce_gradients == "micro_batch",
    )
