"""The [train] section: length and shape of the training, and what a node spends on it; what a rank keeps by that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt, model_validator

from zeroband.config.section import NODE_LOCAL, OwnSection, Section

ActivationCheckpointing = Literal["none", "selective", "full"]
Float8Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"]

DeviceKind = Literal["cuda", "mps", "cpu"]

FLOAT8_MULTIPLE = 16
"""Tensor cores multiply in float8 where all three sizes of a product are multiples of this."""

_STATE_BYTES = 16
"""Parameter, gradient and two moments in float32, for each parameter that a rank holds."""

_COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}
_GRADIENT_BYTES = 4
_FOR_STATE_AND_COPIES = 0.6
"""Share of a GPU's memory that is given away here; activations, the loss and what moves between ranks get the rest."""


class ProfileConfig(OwnSection):
    """A trace of some inner steps, for chrome://tracing and Perfetto."""

    steps: tuple[PositiveInt, PositiveInt] = (10, 15)
    """The first and the last step of it, counted from 1 as in metrics.jsonl; a few, each makes megabytes."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ProfileConfig:
        first, last = self.steps
        if first > last:
            raise ValueError(f"train.profile.steps=[{first}, {last}] ends before it begins; set [{last}, {first}]")
        return self


class TrainConfig(Section):
    """Length and shape of the training."""

    total_steps: PositiveInt = 88_000
    """Inner steps of the whole run."""
    init_from: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Directory of a Llama in Hugging Face's layout to start from, the same content on every node; [model] describes
    the same model. None: random weights of run.seed."""
    batch_size: PositiveInt = 512
    """Sequences of one node in one inner step, over all its ranks and micro-batches."""
    micro_bs: PositiveInt = Field(default=64, json_schema_extra=NODE_LOCAL)
    """Sequences of one rank in one forward pass; lower it when memory runs out."""
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", json_schema_extra=NODE_LOCAL)
    """Compute type; master parameters, gradients' reduction, optimizer and what nodes exchange are always float32."""
    device: DeviceKind | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """What this node computes on: cpu on a machine with GPUs, too. mps is for one rank in float32. None: the first of
    cuda, mps and cpu that is there."""
    activation_checkpointing: ActivationCheckpointing = Field(default="none", json_schema_extra=NODE_LOCAL)
    """Activations that the backward pass makes again. selective: all but products of matrices and attention, a few
    percent slower, half the memory; full: each block, about 30 % slower, the least memory; none: fastest."""
    compile: bool | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """torch.compile each block and the loss: faster on GPUs after a first step of a minute or two; no gain on CPU.
    None: on GPUs."""
    reshard_after_forward: bool | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """FSDP2 frees gathered parameters between forward and backward: less memory, more traffic inside the node. None:
    on GPUs, unless keeping them fits easily; on CPUs, yes."""
    reduce_gradients: Literal["step", "micro_batch"] | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """When the ranks of a node add up their gradients. step: once, and until then each rank holds all of them in
    float32; micro_batch: after each one, into its own shard. None: on GPUs, step where that fits easily; on CPUs, step.
    """
    float8: Float8Recipe | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Multiply in float8 in the blocks' linear layers, by torchao's recipe of this name (extra `float8`): tensorwise is
    the fastest, rowwise_with_gw_hp the most exact. Needs compute capability 8.9; faster only with train.compile. It
    rounds a node's own gradients, not what nodes agree on, so nodes with and without it train together. None: off."""
    non_finite_steps: PositiveInt | None = Field(default=100, json_schema_extra=NODE_LOCAL)
    """Inner steps in a row from which this node learns nothing, since their updates are not finite, after which it ends
    with exit code 4 and without an export. None: it goes on."""
    profile: ProfileConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Trace some steps of each rank, into the node's folder of the run directory. None: none."""
    threads: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """CPU threads of one rank. None: torch's choice."""

    @model_validator(mode="after")
    def _is_profiled_while_it_trains(self) -> TrainConfig:
        if self.profile is not None and self.profile.steps[1] > self.total_steps:
            first, last = self.profile.steps
            raise ValueError(
                f"train.profile.steps=[{first}, {last}] ends after the last step, train.total_steps={self.total_steps}"
            )
        return self

    @model_validator(mode="after")
    def _float8_rounds_bfloat16(self) -> TrainConfig:
        if self.float8 is not None and self.dtype != "bfloat16":
            raise ValueError(f'train.float8={self.float8!r} needs train.dtype = "bfloat16", not {self.dtype!r}')
        return self


@dataclass(frozen=True)
class Placement:
    """What stays in memory between the passes of a step."""

    reshard_after_forward: bool
    """Gathered parameters are freed after a forward pass, and gathered again for the backward pass."""
    reduces_micro_batches: bool
    """Gradients are reduced into shards with every micro-batch, not once with the last one."""


def placement(train: TrainConfig, *, params: int, ranks: int, gpu_bytes: int | None) -> Placement:
    """Decide for a model of `params` values on `ranks` GPUs of `gpu_bytes` each; None: on a CPU.

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
