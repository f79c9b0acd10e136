"""The trainer's interface to a decoder: tokens in, logits or loss out, and its parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from zeroband.config.training import ActivationCheckpointing
from zeroband.model.loss import LogitsLoss, TokenLoss, next_token_loss
from zeroband.node.sharding import NamedParameters


class LanguageModel(nn.Module):
    """A trainable model. May be on the meta device until it is initialised."""

    compiles_whole = False
    """Whether each block compiles to one graph."""
    casts_inputs = True
    """Whether the inputs of blocks are cast to the compute type."""
    knows_documents = True
    """Whether cu_seqlens isolates the documents of a row."""
    gives_logits = True
    """Whether it can be called without targets."""
    has_own_loss = False
    """Whether the model computes its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.logits_loss: LogitsLoss = next_token_loss
        """Computes the loss from logits; may be replaced by a compiled version."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The layers: units of sharding, compilation and recomputation."""
        ...

    @property
    @abstractmethod
    def ends(self) -> Sequence[nn.Module]:
        """Embedding and head, which are sharded separately; empty if tied or unknown."""
        ...

    @abstractmethod
    def recompute(self, how: ActivationCheckpointing) -> None:
        """Set which activations of the blocks are recomputed in the backward pass."""
        ...

    @abstractmethod
    def flops_per_token(self, seq_length: int) -> int:
        """Return the floating-point operations per training token, forward and backward, for MFU."""
        ...

    def trained(self) -> NamedParameters:
        """Return the trained parameters by their names in checkpoints and messages."""
        return NamedParameters({name: p for name, p in self.named_parameters() if p.requires_grad})

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None = None,
        targets: Tensor | None = None,
        z_loss: float = 0.0,
        by_target: bool = False,
    ) -> Tensor | TokenLoss:
        """Return the logits of the next tokens; with targets, their loss instead.

        `by_target`: also return the loss of each target, unless the model has its own loss.
        Shapes: tokens and targets (b, t) int64, cu_seqlens as in `MicroBatch`; returns (b, t, v) or a TokenLoss.
        """
        ...
