"""The [optim] section: the inner optimizer and the schedule of its learning rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, model_validator

from zeroband.config.section import NODE_LOCAL, Section

Decay = Annotated[float, Field(ge=0, lt=1)]
StateDtype = Literal["float32", "bfloat16", "int8"]

MOMENT_BYTES: Mapping[StateDtype, float] = {"float32": 4, "bfloat16": 2, "int8": 1 + 4 / 256}
"""Bytes per value of a moment; int8 has a float32 scale for each block of 256."""

MAX_BFLOAT16_BETA = 0.99
"""bfloat16 has 8 significant bits: a moment that changes by 1 % a step does change, by 0.1 % it stays as it is."""


class AdamWConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 4e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices and embeddings."""
    decay_vectors: bool = False
    """Whether to decay norms and other vectors as well, as in DeMo's source."""


class MuonConfig(Section):
    """Muon for the matrices between embedding and head; AdamW keeps the rest (arXiv:2502.16982).

    Orthogonalises the momentum before each step. As DiLoCo's inner optimizer: MuLoCo (arXiv:2505.23725).
    """

    lr: PositiveFloat | None = None
    """Peak learning rate of the matrices. None: that of optim.adamw, which suits adjust_lr = "match_rms_adamw"."""
    momentum: Decay = 0.95
    """Decay of the mean of gradients."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = Field(default=5, ge=1, le=20)
    """Newton-Schulz iterations of the orthogonalisation."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Decoupled weight decay of the matrices. None: that of optim.adamw."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of a step: 0.2 sqrt(max(rows, columns)), as large as AdamW's, or sqrt(max(1, rows / columns))."""


class CosineSchedule(Section):
    """Cosine decay from the peak."""

    type: Literal["cosine"] = "cosine"
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""


class LinearSchedule(Section):
    """Linear decay from the peak."""

    type: Literal["linear"]
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""


class WarmupStableDecaySchedule(Section):
    """Constant peak, then a linear decay in the last part of the run."""

    type: Literal["wsd"]
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """Fraction of all steps in the final decay."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""


LrSchedule = Annotated[CosineSchedule | LinearSchedule | WarmupStableDecaySchedule, Field(discriminator="type")]


class OptimConfig(Section):
    """The inner optimizer and its schedule."""

    adamw: AdamWConfig = AdamWConfig()
    """The inner optimizer; with [optim.muon] only of embeddings, head and vectors."""
    muon: MuonConfig | None = None
    """Muon for the matrices between them. None: AdamW for all parameters. Not with outer.type = "demo"."""
    state_dtype: StateDtype = Field(default="float32", json_schema_extra=NODE_LOCAL)
    """Type of AdamW's moments in memory, by torchao (extra `torchao`), for cards with little memory: bfloat16 takes 4
    bytes a parameter, int8 2, float32 8. Checkpoints keep float32, so it may change at any start, and differ between
    nodes."""
    schedule: LrSchedule = CosineSchedule()
    """Learning rate after the warm-up, by inner steps."""
    warmup_steps: int = Field(default=1000, ge=0)
    """Inner steps of linear warm-up."""
    clip_norm: PositiveFloat | None = 1.0
    """Maximum global gradient norm. None: no clipping."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-partition term, which keeps logits small; try 1e-4 if training diverges."""

    @property
    def suits_bfloat16(self) -> bool:
        """Whether changes of the moments in a step survive rounding to bfloat16."""
        return max(self.adamw.betas) <= MAX_BFLOAT16_BETA

    @model_validator(mode="after")
    def _moments_change_in_bfloat16(self) -> OptimConfig:
        if self.state_dtype == "bfloat16" and not self.suits_bfloat16:
            raise ValueError(
                f'optim.state_dtype="bfloat16" rounds away what moments change with optim.adamw.betas='
                f'{list(self.adamw.betas)}; set "int8", or betas of at most {MAX_BFLOAT16_BETA}'
            )
        return self
