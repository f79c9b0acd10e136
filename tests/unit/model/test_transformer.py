"""The decoder as a whole: what it may see, what its switches change, and its parameter names."""

import pytest
import torch

from zeroband.config.schema import ModelConfig
from zeroband.model import Transformer, init_weights, next_token_loss

VOCAB = 61


def model_of(**changes: object) -> Transformer:
    model = Transformer(ModelConfig(**{"d_model": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, **changes}), VOCAB)
    init_weights(model, seed=1)
    return model


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


def test_forward_with_document_ids_equals_each_document_alone() -> None:
    model, tokens = model_of(), tokens_of(1, 12)
    ids = torch.tensor([[0] * 5 + [1] * 7], dtype=torch.int32)
    packed = model(tokens, ids)
    torch.testing.assert_close(packed[:, :5], model(tokens[:, :5]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 5:], model(tokens[:, 5:]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(packed[:, 5:], model(tokens)[:, 5:], atol=1e-4)


def test_forward_with_one_document_equals_no_mask() -> None:
    model, tokens = model_of(), tokens_of(2, 12)
    torch.testing.assert_close(model(tokens, torch.zeros(2, 12, dtype=torch.int32)), model(tokens))


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
        model = Transformer(ModelConfig(d_model=32, n_layers=1, n_heads=2, tie_embeddings=True), VOCAB)
    model.to_empty(device="cpu")
    init_weights(model, seed=1)
    model.embed_tokens.weight.data.zero_()
    assert model(tokens_of(1, 4)).count_nonzero() == 0


@pytest.mark.parametrize("with_documents", [False, True])
def test_recompute_gives_the_same_gradients(with_documents: bool) -> None:
    tokens = tokens_of(2, 10)
    ids = torch.tensor([[0] * 4 + [1] * 6] * 2, dtype=torch.int32) if with_documents else None
    gradients: list[list[torch.Tensor]] = []
    for recompute in (False, True):
        model = model_of()
        for block in model.layers:
            block.recompute = recompute
        next_token_loss(model(tokens, ids), tokens).objective.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) == len(list(model_of().parameters()))
    assert all(torch.equal(plain, again) for plain, again in zip(*gradients, strict=True))


def test_recompute_keeps_fewer_activations() -> None:
    saved: list[int] = []
    for recompute in (False, True):
        model, kept = model_of(), 0
        for block in model.layers:
            block.recompute = recompute

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal kept
            kept += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            model(tokens_of(4, 32))
        saved.append(kept)
    assert saved[1] < saved[0] / 3


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
