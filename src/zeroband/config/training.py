"""The [train] section: length of the training and how a node computes it; derives what ranks keep in memory."""

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
"""All three sizes of a float8 product must be multiples of this on tensor cores."""

_STATE_BYTES = 16
"""Parameter, gradient and two moments in float32, per parameter of a rank."""

_COMPUTE_BYTES = {"bfloat16": 2, "float32": 4}
_GRADIENT_BYTES = 4
_COPIES_ON_HOST = 1_000_000_000
"""Bytes of gathered parameters that the ranks of a node without GPUs may keep together."""
_FOR_STATE_AND_COPIES = 0.6
"""Share of a GPU's memory for state and gathered copies; the rest is for activations, loss and communication."""


class ProfileConfig(OwnSection):
    """A trace of some inner steps, for chrome://tracing and Perfetto."""

    steps: tuple[PositiveInt, PositiveInt] = (10, 15)
    """First and last step of the trace, counted from 1 as in metrics.jsonl; each step takes megabytes."""

    @model_validator(mode="after")
    def _is_a_range(self) -> ProfileConfig:
        first, last = self.steps
        if first > last:
            raise ValueError(f"train.profile.steps=[{first}, {last}] ends before it begins; set [{last}, {first}]")
        return self


class TrainConfig(Section):
    """Length and computation of the training."""

    total_steps: PositiveInt = 88_000
    """Inner steps of the whole run."""
    init_from: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Folder of a Llama in Hugging Face's layout to start from, equal on every node and described by [model]. None:
    random weights from run.seed."""
    batch_size: PositiveInt = 512
    """Sequences per inner step of a node, over all its ranks and micro-batches."""
    micro_bs: PositiveInt = Field(default=64, json_schema_extra=NODE_LOCAL)
    """Sequences per forward pass of a rank; lower it if memory runs out."""
    dtype: Literal["bfloat16", "float32"] = Field(default="bfloat16", json_schema_extra=NODE_LOCAL)
    """Compute type. Master parameters, optimizer and exchange between nodes are always float32."""
    device: DeviceKind | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Device to compute on; cpu also on a machine with GPUs, mps for one rank in float32. None: the first available of
    cuda, mps and cpu."""
    activation_checkpointing: ActivationCheckpointing = Field(default="none", json_schema_extra=NODE_LOCAL)
    """Activations to recompute in the backward pass. selective: all but matrix products and attention, a few percent
    slower, half the memory. full: whole blocks, about 30 % slower, the least memory. none: the fastest."""
    compile: bool | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """torch.compile the blocks and the loss: faster on GPUs after a first step of one or two minutes; no gain on CPUs.
    None: on GPUs."""
    reshard_after_forward: bool | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """FSDP2 frees gathered parameters between forward and backward: less memory, more traffic inside the node. None:
    unless keeping them fits easily."""
    reduce_gradients: Literal["step", "micro_batch"] | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """When the ranks of a node reduce gradients. step: once, and until then each rank holds all of them in float32.
    micro_batch: after each micro-batch, into its shard. None: step on CPUs, and on GPUs where it fits easily."""
    reduce_dtype: Literal["float32", "bfloat16"] = Field(default="float32", json_schema_extra=NODE_LOCAL)
    """Type in which the ranks of a node sum gradients. bfloat16 halves this traffic, for GPUs without NVLink, and
    rounds each sum; it needs reduce_gradients = "micro_batch", which adds the sums up in float32."""
    float8: Float8Recipe | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Use float8 in the blocks' linear layers, by this torchao recipe (extra `torchao`): tensorwise is the fastest,
    rowwise_with_gw_hp the most exact. Needs compute capability 8.9; faster only with train.compile. Nodes with and
    without it can train together. None: off."""
    non_finite_steps: PositiveInt | None = Field(default=100, json_schema_extra=NODE_LOCAL)
    """Consecutive inner steps with non-finite updates after which this node ends with exit code 4 and without an
    export. None: never."""
    profile: ProfileConfig | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Trace some steps of each rank into the node's folder of the run directory. None: no trace."""
    threads: PositiveInt | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """CPU threads per rank. None: torch's default."""

    @model_validator(mode="after")
    def _is_profiled_while_it_trains(self) -> TrainConfig:
        if self.profile is not None and self.profile.steps[1] > self.total_steps:
            first, last = self.profile.steps
            raise ValueError(
                f"train.profile.steps=[{first}, {last}] ends after the last step, train.total_steps={self.total_steps}"
            )
        return self

    @model_validator(mode="after")
    def _short_sums_are_added_up_in_float32(self) -> TrainConfig:
        if self.reduce_dtype == "bfloat16" and self.reduce_gradients != "micro_batch":
            raise ValueError(
                'train.reduce_dtype="bfloat16" would add up a whole step in bfloat16; set train.reduce_gradients = '
                '"micro_batch" with it'
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
    """Whether gathered parameters are freed after the forward pass, and gathered again for the backward pass."""
    reduces_micro_batches: bool
    """Whether gradients are reduced with every micro-batch, not only with the last."""


def placement(train: TrainConfig, *, params: int, ranks: int, gpu_bytes: int | None) -> Placement:
    """Choose the placement for `params` values on `ranks` GPUs of `gpu_bytes` each; None: on a CPU.

    The configuration decides where it is set. The rest of the memory keeps gathered parameters first, since each
    micro-batch would gather them twice, then whole gradients.
    """
    if gpu_bytes is None:
        copies = ranks * params * _COMPUTE_BYTES[train.dtype]
        keeps_parameters, keeps_gradients = copies <= _COPIES_ON_HOST, True
    else:
        room = _FOR_STATE_AND_COPIES * gpu_bytes - params * _STATE_BYTES / ranks
        room_after = room - params * _COMPUTE_BYTES[train.dtype]
        keeps_parameters, keeps_gradients = room_after >= 0, room_after >= params * _GRADIENT_BYTES
    return Placement(
        not keeps_parameters if train.reshard_after_forward is None else train.reshard_after_forward,
        not keeps_gradients if train.reduce_gradients is None else train.reduce_gradients == "micro_batch",
    )
