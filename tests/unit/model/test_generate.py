"""Sampling: length, determinism, context and refusal."""

import pytest
import torch
from torch import Tensor, nn

from zeroband.config.model import LlamaConfig
from zeroband.model import Transformer, generate, init_weights


class Successor(nn.Module):
    """Predicts the last token + 1 for sure and remembers how much it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None) -> Tensor:
        assert cu_seqlens is None
        assert not torch.is_grad_enabled()
        self.lengths.append(tokens.shape[1])
        return 50.0 * torch.nn.functional.one_hot((tokens + 1) % 10, 10).float()


def random_model() -> Transformer:
    model = Transformer(LlamaConfig(d_model=16, n_layers=1, n_heads=2), 40)
    init_weights(model, 0)
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_generate_appends_what_the_model_predicts(temperature: float) -> None:
    out = generate(Successor(), torch.tensor([3, 7]), max_new_tokens=4, temperature=temperature, seed=0, context=8)
    assert out.tolist() == [3, 7, 8, 9, 0, 1]


def test_generate_shows_at_most_the_context() -> None:
    model = Successor()
    generate(model, torch.tensor([1, 2]), max_new_tokens=4, temperature=0.0, seed=0, context=3)
    assert model.lengths == [2, 3, 3, 3]


def test_generate_is_a_function_of_seed() -> None:
    prompt = torch.tensor([1])
    first, again, other = (
        generate(random_model(), prompt, max_new_tokens=20, temperature=1.0, seed=seed, context=8) for seed in (0, 0, 1)
    )
    assert first.tolist() == again.tolist() != other.tolist()


def test_generate_follows_temperature() -> None:
    bold = generate(random_model(), torch.tensor([1]), max_new_tokens=40, temperature=1.0, seed=0, context=8)
    cold = generate(random_model(), torch.tensor([1]), max_new_tokens=40, temperature=1e-4, seed=0, context=8)
    greedy = generate(random_model(), torch.tensor([1]), max_new_tokens=40, temperature=0.0, seed=0, context=8)
    assert cold.tolist() == greedy.tolist() != bold.tolist()


def test_generate_restores_training_mode() -> None:
    model = random_model().train()
    generate(model, torch.tensor([1]), max_new_tokens=1, temperature=0.0, seed=0, context=8)
    assert model.training
    assert model.layers[0].training


@pytest.mark.parametrize(
    ("prompt", "temperature", "context"), [([], 1.0, 8), ([[1, 2]], 1.0, 8), ([1], -1.0, 8), ([1], 1.0, 0)]
)
def test_generate_refuses_senseless_requests(prompt: list[int], temperature: float, context: int) -> None:
    tokens = torch.tensor(prompt, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"prompt has shape|context="):
        generate(Successor(), tokens, max_new_tokens=1, temperature=temperature, seed=0, context=context)
