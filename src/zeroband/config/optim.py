"""The [optim] section: the inner optimizer and the schedule of its learning rate."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from zeroband.config.section import Section

Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamWConfig(Section):
    """AdamW."""

    lr: PositiveFloat = 4e-4
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled decay of matrices and embeddings."""
    decay_vectors: bool = False
    """Whether norms and other vectors are decayed, too, as in DeMo's source."""


class MuonConfig(Section):
    """Muon, for the matrices between embedding and head; AdamW keeps embeddings, head and vectors (arXiv:2502.16982).

    Its momentum is made orthogonal before it is a step. As inner optimizer of DiLoCo: MuLoCo (arXiv:2505.23725).
    """

    lr: PositiveFloat | None = None
    """Peak learning rate of the matrices. None: that of optim.adamw, which fits where adjust_lr = "match_rms_adamw"."""
    momentum: Decay = 0.95
    """Decay of the mean of gradients."""
    nesterov: bool = True
    """Whether the step looks ahead by one gradient."""
    ns_steps: int = Field(default=5, ge=1, le=20)
    """Newton-Schulz iterations that make a matrix orthogonal."""
    weight_decay: float | None = Field(default=None, ge=0)
    """Decoupled decay of the matrices. None: that of optim.adamw."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of a step: 0.2 sqrt(max(rows, columns)), as large as AdamW's; or sqrt(max(1, rows / columns))."""


class CosineSchedule(Section):
    """Half a cosine from the peak down."""

    type: Literal["cosine"] = "cosine"
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class LinearSchedule(Section):
    """A straight line from the peak down."""

    type: Literal["linear"]
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


class WarmupStableDecaySchedule(Section):
    """The peak, held until the last part of the run, then a straight line down."""

    type: Literal["wsd"]
    decay_ratio: float = Field(default=0.2, gt=0, le=1)
    """Share of all steps spent in the final decay."""
    final_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""


LrSchedule = Annotated[CosineSchedule | LinearSchedule | WarmupStableDecaySchedule, Field(discriminator="type")]


class OptimConfig(Section):
    """The inner optimizer and its schedule."""

    adamw: AdamWConfig = AdamWConfig()
    """The inner optimizer; with [optim.muon] of embeddings, head and vectors alone."""
    muon: MuonConfig | None = None
    """Muon for the matrices between them. None: AdamW for all. Not with outer.type = "demo"."""
    schedule: LrSchedule = CosineSchedule()
    """Learning rate after warm-up; counts inner steps."""
    warmup_steps: int = Field(default=1000, ge=0)
    """Inner steps over which the learning rate grows linearly to its peak."""
    clip_norm: PositiveFloat | None = 1.0
    """Largest global norm of the gradient. None: no clipping."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-partition term that keeps logits small; 1e-4 where training diverges."""
