"""A model in one file: a recurrent byte model, trained by several nodes.

    ./scripts/simulate_multi_node.sh 2 1 src/zeroband/train.py @configs/debug/own-model.toml

`build(config)` returns a torch module that maps tokens (b, t) to logits (b, t, v); `zeroband/model/custom_model.py`
says what else it may take and give. Outer algorithms, checkpoints, joins and sharding are those of every model. The
layers lie in an nn.ModuleList, each of which is sharded by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A linear recurrence whose state begins anew with each document, and a feed-forward part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gates = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, begins: Tensor) -> Tensor:
        keep, new = self.gates(self.norm(x)).chunk(2, dim=-1)  # (b, t, d) each
        keep = torch.sigmoid(keep) * ~begins
        state, states = torch.zeros_like(new[:, 0]), list[Tensor]()
        for place in range(x.shape[1]):
            state = keep[:, place] * state + (1 - keep[:, place]) * new[:, place]
            states.append(state)
        return x + self.out(torch.stack(states, dim=1))


class RecurrentModel(nn.Module):
    def __init__(self, vocab_size: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        begins = torch.zeros_like(tokens, dtype=torch.bool) if positions is None else positions == 0
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, begins[..., None])
        return self.head(x)


def build(config) -> nn.Module:
    return RecurrentModel(config.vocab_size, config.settings.get("width", 64), config.settings.get("layers", 2))
