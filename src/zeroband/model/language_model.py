"""A decoder as the trainer sees it, ours or another: tokens in, logits or their loss out, and its parts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor, nn

from zeroband.config.training import ActivationCheckpointing
from zeroband.model.loss import LogitsLoss, TokenLoss, next_token_loss
from zeroband.node.sharding import NamedParameters


class LanguageModel(nn.Module):
    """What is trained. May be on the meta device until its values are given."""

    compiles_whole = False
    """Whether each block is one graph for the compiler."""
    casts_inputs = True
    """Whether what blocks are called with is cast to the compute type."""
    knows_documents = True
    """Whether it keeps the documents of a row apart where it is told their borders."""
    gives_logits = True
    """Whether it can be called without targets."""
    has_own_loss = False
    """Whether the loss is its own rather than made of its logits here."""

    def __init__(self) -> None:
        super().__init__()
        self.logits_loss: LogitsLoss = next_token_loss
        """What makes a loss of logits; may be replaced by a compiled one."""

    @property
    @abstractmethod
    def blocks(self) -> Sequence[nn.Module]:
        """The layers, each of which is sharded, compiled and recomputed by itself."""
        ...

    @property
    @abstractmethod
    def ends(self) -> Sequence[nn.Module]:
        """Embedding and head, sharded each by itself; none where they share a weight, or are not known."""
        ...

    @abstractmethod
    def recompute(self, how: ActivationCheckpointing) -> None:
        """Say which activations of the blocks are made again in the backward pass."""
        ...

    @abstractmethod
    def flops_per_token(self, seq_length: int) -> int:
        """Floating-point operations of one training token, forward and backward, as MFU is reported."""
        ...

    def trained(self) -> NamedParameters:
        """The parameters that are trained, by the names under which nodes and checkpoints know them."""
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
        """Logits of the next token at every position; with targets, their loss instead.

        `by_target`: the loss of each target as well, unless the model has its own loss.
        Shapes: tokens and targets (b, t) int64, cu_seqlens as in `MicroBatch`; gives (b, t, v), or a TokenLoss.
        """
        ...
