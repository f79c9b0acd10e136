"""The decoder as a whole: what it may see, what its switches change, and its parameter names."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from zeroband.config.model import LlamaConfig
from zeroband.model import Transformer, init_weights, next_token_loss

VOCAB = 61
CHECKPOINTING = ("none", "selective", "full")


def model_of(**changes: object) -> Transformer:
    model = Transformer(LlamaConfig(**{"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, **changes}), VOCAB)
    init_weights(model, seed=1)
    return model


class Operators(TorchDispatchMode):
    """Records the names of all operators that run in it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def tokens_of(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(0))


def test_forward_gives_logits_of_every_position() -> None:
    assert model_of()(tokens_of(3, 7)).shape == (3, 7, VOCAB)


def test_forward_never_looks_ahead() -> None:
    model, tokens = model_of(), tokens_of(1, 12)
    changed = tokens.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % VOCAB
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[0, :8], after[0, :8])
    assert not torch.allclose(before[0, 8:], after[0, 8:])


def test_forward_with_documents_equals_each_document_alone() -> None:
    model, tokens = model_of(), tokens_of(1, 12)
    packed = model(tokens, torch.tensor([0, 5, 12], dtype=torch.int32))
    torch.testing.assert_close(packed[:, :5], model(tokens[:, :5]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 5:], model(tokens[:, 5:]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(packed[:, 5:], model(tokens)[:, 5:], atol=1e-4)


def test_forward_with_one_document_equals_no_mask() -> None:
    model, tokens = model_of(), tokens_of(2, 12)
    torch.testing.assert_close(model(tokens, torch.tensor([0, 12, 24], dtype=torch.int32)), model(tokens))


def test_tied_head_is_one_parameter_with_gradient_from_both_uses() -> None:
    model, tokens = model_of(tie_embeddings=True), tokens_of(1, 6)
    names = dict(model.named_parameters())
    assert "lm_head.weight" not in names
    next_token_loss(model(tokens), tokens).objective.backward()
    gradient = names["embed_tokens.weight"].grad
    assert gradient is not None
    unseen = [token for token in range(VOCAB) if token not in tokens]
    assert gradient[unseen].abs().amin(dim=1).max() > 0  # through the head alone


def test_untied_head_leaves_unseen_embeddings_without_gradient() -> None:
    model, tokens = model_of(), tokens_of(1, 6)
    next_token_loss(model(tokens), tokens).objective.backward()
    gradient = model.embed_tokens.weight.grad
    assert gradient is not None
    unseen = [token for token in range(VOCAB) if token not in tokens]
    assert gradient[unseen].count_nonzero() == 0


def test_tie_survives_meta_and_to_empty() -> None:
    with torch.device("meta"):
        model = Transformer(LlamaConfig(d_model=32, n_layers=1, n_heads=2, tie_embeddings=True), VOCAB)
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
    model.embed_tokens.weight.data.zero_()
    assert model(tokens_of(1, 4)).count_nonzero() == 0


@pytest.mark.parametrize("with_documents", [False, True])
def test_recompute_gives_the_same_gradients(with_documents: bool) -> None:
    tokens = tokens_of(2, 10)
    borders = torch.tensor([0, 4, 10, 14, 20], dtype=torch.int32) if with_documents else None
    gradients: list[list[torch.Tensor]] = []
    for how in CHECKPOINTING:
        model = model_of()
        for block in model.layers:
            block.checkpointing = how
        model(tokens, borders, tokens).objective.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert {len(found) for found in gradients} == {len(list(model_of().parameters()))}
    assert all(
        torch.equal(plain, again) for found in gradients for plain, again in zip(gradients[0], found, strict=True)
    )


def products_of(how: str) -> int:
    """Number of matrix products of a pass forward and back."""
    model = model_of()
    for block in model.layers:
        block.checkpointing = how
    with Operators() as seen:
        model(tokens_of(4, 32), None, tokens_of(4, 32)).objective.backward()
    return sum(name.startswith("aten.mm") for name in seen.names)


def test_selective_recompute_multiplies_no_matrix_again() -> None:
    assert products_of("none") == products_of("selective") < products_of("full")


def test_full_recompute_keeps_fewer_activations() -> None:
    kept: dict[str, int] = {}
    for how in ("none", "full"):
        model, kept[how] = model_of(), 0
        for block in model.layers:
            block.checkpointing = how

        def count(tensor: torch.Tensor, how: str = how) -> torch.Tensor:
            kept[how] += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(tokens_of(4, 32))
    assert kept["full"] < kept["none"] / 3


@pytest.mark.slow
def test_parameter_names_are_those_of_hugging_face_llama() -> None:
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=VOCAB,
        intermediate_size=128, rms_norm_eps=1e-5, rope_theta=10_000.0, tie_word_embeddings=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    llama, ours = transformers.LlamaForCausalLM(config), model_of(d_ff=128)
    renamed = {name if name.startswith("lm_head") else f"model.{name}": p for name, p in ours.state_dict().items()}
    llama.load_state_dict(renamed, strict=True)
    tokens = tokens_of(2, 9)
    torch.testing.assert_close(ours(tokens), llama(tokens).logits, rtol=1e-4, atol=1e-5)
