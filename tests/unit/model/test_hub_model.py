"""Models of transformers in the trainer: their loss, borders of documents, adapters, export, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.model.foreign import FAMILIES, SIZES, hub_section, trained_with

from zeroband.config.model import TransformersConfig
from zeroband.errors import ConfigError
from zeroband.export.directory import TrainedModel, check_parity, whole_parameters, write_directory
from zeroband.export.opened import open_trained
from zeroband.model.foreign import FirstValues, positions_of
from zeroband.model.generate import evaluating
from zeroband.model.hub_model import TransformersBlueprint
from zeroband.model.loss import IGNORE_INDEX
from zeroband.model.registry import blueprint_of_record
from zeroband.node.mesh import LocalMesh, init_local_mesh
from zeroband.runtime.build import TrainerParts
from zeroband.runtime.loop import forward_backward

transformers = pytest.importorskip("transformers", reason="needs the extra hf")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def local() -> Iterator[LocalMesh]:
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()


def theirs_of(family: str, **changes: Any) -> Any:
    """The same model by transformers alone: its configuration, its random weights of the same seed."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def theirs_on(module: Any, tokens: torch.Tensor, targets: torch.Tensor) -> Any:
    """What transformers computes of rows in which an end of document begins another one."""
    positions = torch.zeros_like(tokens)
    for row in range(tokens.shape[0]):
        for place in range(1, tokens.shape[1]):
            begins = tokens[row, place] == 256 and targets[row, place] != IGNORE_INDEX  # padding is one document
            positions[row, place] = 0 if begins else positions[row, place - 1] + 1
    # with a cache transformers ignores where documents begin
    return module(input_ids=tokens, position_ids=positions, labels=tokens, shift_labels=targets, use_cache=False)


def take_step(node: TrainerParts) -> float:
    loss = forward_backward(node)
    node.inner.step()
    node.inner.zero_grad()
    return loss.nats.item() / loss.tokens


def trained(node: TrainerParts) -> TrainedModel:
    held = whole_parameters(node.parameters, keeps=True)
    return TrainedModel(node.blueprint, node.tokenizer, node.config.data.seq_length, held.__getitem__)


@pytest.mark.parametrize("family", FAMILIES)
def test_first_loss_gradients_and_export_are_transformers_own(family: str, local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(hub_section(family), local, tmp_path, train={"micro_bs": 4})
    node.loader.assign([(0, 4)])
    (batch,) = node.loader.next_step()
    assert batch.cu_seqlens is not None and len(batch.cu_seqlens) > 6, "there are borders inside the rows"
    node.loader.assign([(0, 4)])
    passed = forward_backward(node)
    module = theirs_of(family)
    expected = theirs_on(module, batch.tokens, batch.targets)
    expected.loss.backward()
    balance = getattr(expected, "aux_loss", None)
    reported = expected.loss if balance is None else expected.loss - module.router_aux_loss_coef * balance
    assert passed.nats.item() / passed.tokens == pytest.approx(reported.item(), abs=1e-6)
    gradients = dict(module.named_parameters())
    seen = dict(node.parameters.named_parameters())
    assert seen.keys() == gradients.keys()
    for name, parameter in seen.items():
        torch.testing.assert_close(parameter.grad, gradients[name].grad, rtol=1e-4, atol=1e-6)
    node.inner.step()
    write_directory(trained(node), tmp_path / "out", "float32")
    parity = check_parity(trained(node), tmp_path / "out", "float32")
    assert parity is not None and parity.is_equal and parity.logits > 1000
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert there.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, do_sample=False).shape == (1, 8)
    assert not torch.equal(there.get_input_embeddings().weight, module.get_input_embeddings().weight)


def test_balance_of_experts_is_learned_but_not_reported(local: LocalMesh, tmp_path: Path) -> None:
    routers = []
    for share in (0.0, 1.0):
        section = hub_section("mixtral")
        section["config"]["router_aux_loss_coef"] = share
        node = trained_with(section, local, tmp_path)
        node.loader.assign([(0, 4)])
        loss = forward_backward(node)
        router = dict(node.parameters.named_parameters())["model.layers.0.mlp.gate.weight"]
        assert router.grad is not None
        routers.append((loss.nats.item(), router.grad.clone()))
    assert routers[0][0] == routers[1][0]
    assert not torch.equal(routers[0][1], routers[1][1])


def test_positions_begin_anew_with_each_document() -> None:
    borders = torch.tensor([0, 3, 4, 6, 8], dtype=torch.int32)
    assert positions_of(borders, torch.Size((2, 4))).tolist() == [[0, 1, 2, 0], [0, 1, 0, 1]]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_no_document_sees_another(family: str, local: LocalMesh, tmp_path: Path) -> None:
    model = trained_with(hub_section(family), local, tmp_path).model
    tokens = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(1))
    other = tokens.clone()
    other[0, :20] = (other[0, :20] + 7) % 256
    borders = torch.tensor([0, 20, 32], dtype=torch.int32)
    with evaluating(model):
        first, second = model(tokens, borders), model(other, borders)
        crossing = model(other)
    torch.testing.assert_close(first[:, 20:], second[:, 20:], rtol=0, atol=1e-6)
    assert not torch.allclose(crossing[:, 20:], second[:, 20:], atol=1e-4)


@pytest.mark.parametrize("how", ["full", "selective"])
def test_recomputed_activations_change_no_gradient(how: str, local: LocalMesh, tmp_path: Path) -> None:
    """With dropout, too: what is made again is dropped as it was."""
    gradients = []
    for checkpointing in ("none", how):
        section = hub_section("qwen3")
        section["config"]["attention_dropout"] = 0.3
        node = trained_with(section, local, tmp_path, train={"activation_checkpointing": checkpointing})
        torch.manual_seed(5)
        node.loader.assign([(0, 4)])
        forward_backward(node)
        gradients.append([parameter.grad for _, parameter in node.parameters.named_parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(recomputed, plain, rtol=1e-5, atol=1e-7)


def test_exported_directory_is_a_model_to_begin_with_and_to_evaluate(local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(hub_section("qwen3"), local, tmp_path)
    node.loader.assign([(0, 4)])
    take_step(node)
    write_directory(trained(node), tmp_path / "out", "float32")
    section = {"type": "transformers", "name": str(tmp_path / "out")}
    again = trained_with(section, local, tmp_path)
    for (name, before), (_, after) in zip(
        node.parameters.named_parameters(), again.parameters.named_parameters(), strict=True
    ):
        assert torch.equal(before, after), name
    fresh = trained_with({**section, "weights": "random"}, local, tmp_path)
    assert not torch.equal(next(fresh.model.parameters()), next(again.model.parameters()))
    opened = open_trained(str(tmp_path / "out"))
    ids = torch.arange(8)[None]
    with evaluating(node.model):
        torch.testing.assert_close(opened.model.build(torch.device("cpu"))(ids), node.model(ids))


def test_record_in_a_checkpoint_makes_the_same_model(local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(hub_section("gemma3_text"), local, tmp_path)
    record = node.blueprint.to_record()
    again = blueprint_of_record(record, seq_length=32)
    assert again.to_record() == record
    built = again.build(whole_parameters(node.parameters, keeps=True).__getitem__, torch.device("cpu"))
    ids = torch.arange(8)[None]
    with evaluating(node.model):
        assert torch.equal(built(ids), node.model(ids))


def test_muon_steps_the_matrices_of_the_layers(local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(hub_section("mixtral"), local, tmp_path, optim={"muon": {}})
    node.loader.assign([(0, 4)])
    take_step(node)
    moved = {name for name, moment in node.inner.moments()["exp_avg_sq"].items() if moment.any()}
    matrices = {name for name, p in node.parameters.named_parameters() if p.ndim > 1}
    assert matrices - moved == {name for name in matrices if ".layers." in name}
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"} <= moved


def test_architecture_that_ignores_borders_is_refused_with_document_mask(local: LocalMesh, tmp_path: Path) -> None:
    config = {"model_type": "opt", "vocab_size": 320, "hidden_size": 16, "ffn_dim": 32, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "max_position_embeddings": 64, "word_embed_proj_dim": 16}
    section = {"type": "transformers", "config": config}
    with pytest.raises(ConfigError, match=r"does not isolate the documents of a row; set data\.document_mask=false"):
        trained_with(section, local, tmp_path)
    node = trained_with(section, local, tmp_path, data={"document_mask": False})
    node.loader.assign([(0, 4)])
    assert take_step(node) == pytest.approx(5.8, abs=0.3)


def test_buffers_that_no_step_trains_come_back_with_a_checkpoint(local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(hub_section("qwen3"), local, tmp_path)
    record = node.blueprint.to_record()
    module: Any = node.model.module
    module.register_buffer("bias", torch.tensor([0.1, 0.7]))
    kept = FirstValues.of(module, seed=0)
    again = FirstValues.from_record(json.loads(json.dumps(kept.to_record())))
    module.bias.zero_()
    again.give(module)
    assert torch.equal(module.bias, torch.tensor([0.1, 0.7]))
    assert FirstValues.from_record(record["first_values"]).digests == FirstValues.of(theirs_of("qwen3"), seed=0).digests


def test_weights_that_lack_a_layer_are_refused(local: LocalMesh, tmp_path: Path) -> None:
    node = trained_with(hub_section("mistral"), local, tmp_path)
    write_directory(trained(node), tmp_path / "out", "float32")
    section = {"type": "transformers", "name": str(tmp_path / "out"), "config": {"num_hidden_layers": 3}}
    with pytest.raises(ConfigError, match=r"the weights of model\.name=.* lack model\.layers\.2\."):
        trained_with(section, local, tmp_path)


# -- adapters ------------------------------------------------------------------------------------------------------


LORA = {"r": 2, "alpha": 4.0, "target_modules": ("q_proj", "v_proj")}


@pytest.fixture(scope="module")
def base(local: LocalMesh, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that others begin with, as a directory of weights and tokenizer."""
    pytest.importorskip("peft", reason="needs the extra hf")
    folder = tmp_path_factory.mktemp("base")
    write_directory(trained(trained_with(hub_section("qwen3"), local, folder)), folder / "model", "float32")
    return folder / "model"


def adapted(base: Path, local: LocalMesh, tmp_path: Path) -> TrainerParts:
    return trained_with({"type": "transformers", "name": str(base), "lora": LORA}, local, tmp_path)


def test_adapters_alone_are_trained_and_known_to_the_nodes(base: Path, local: LocalMesh, tmp_path: Path) -> None:
    node = adapted(base, local, tmp_path)
    names = [name for name, _ in node.parameters.named_parameters()]
    assert len(names) == 2 * 2 * 2 and all("lora_" in name for name in names)
    frozen = {name: p.clone() for name, p in node.model.named_parameters() if not p.requires_grad}
    before = {name: p.clone() for name, p in node.parameters.named_parameters()}
    node.loader.assign([(0, 8)])
    losses = [take_step(node) for _ in range(2)]
    assert all(torch.equal(p, frozen[name]) for name, p in node.model.named_parameters() if name in frozen)
    assert any(not torch.equal(p, before[name]) for name, p in node.parameters.named_parameters())
    assert losses[0] == pytest.approx(5.77, abs=0.1)
    other = adapted(base, local, tmp_path)
    assert other.shared["model (frozen parameters)"] == node.shared["model (frozen parameters)"]


def test_other_base_has_another_fingerprint(base: Path, local: LocalMesh, tmp_path: Path) -> None:
    node = adapted(base, local, tmp_path)
    module = transformers.AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        module.model.layers[1].mlp.up_proj.weight[0, 0] += 1e-3
    module.save_pretrained(tmp_path / "changed")
    node.tokenizer.save(tmp_path / "changed", seq_length=32)
    section = {"type": "transformers", "name": str(tmp_path / "changed"), "lora": LORA}
    other = trained_with(section, local, tmp_path)
    differing = {key for key in node.shared if node.shared[key] != other.shared[key]}
    assert differing == {"model (frozen parameters)"}


def test_exported_adapters_are_loaded_by_peft(base: Path, local: LocalMesh, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the extra hf")
    node = adapted(base, local, tmp_path)
    node.loader.assign([(0, 8)])
    take_step(node)
    take_step(node)
    write_directory(trained(node), tmp_path / "out", "float32")
    assert (tmp_path / "out" / "adapter_model.safetensors").stat().st_size < 20_000
    there = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(8)[None]
    with evaluating(node.model):
        torch.testing.assert_close(there(ids).logits, node.model(ids))


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "qwen33"}, r"'qwen33' is not an architecture of transformers .* did you mean 'qwen3'"),
        ({"hiden_size": 64}, r"model\.config\.hiden_size: qwen3 .* has no such key; did you mean hidden_size\?"),
        ({"vocab_size": 200}, r"data\.tokenizer has 257 ids but the embedding of \[model\.config\] only 200 rows"),
        ({"max_position_embeddings": 16}, r"data\.seq_length=32 is longer than the 16 positions"),
        ({"hidden_size": "wide"}, r"transformers cannot open \[model\.config\]"),
        ({"model_type": "vit"}, r"\[model\.config\] is not a causal language model of transformers"),
    ],
)
def test_model_that_cannot_be_is_refused(changes: dict[str, Any], complaint: str) -> None:
    config = {"model_type": "qwen3", **SIZES, **changes}
    if changes == {"model_type": "vit"}:
        config = changes
    with pytest.raises(ConfigError, match=complaint):
        TransformersBlueprint(TransformersConfig(type="transformers", config=config), ids=257, seq_length=32)


def test_directory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    section = TransformersConfig(type="transformers", name=str(tmp_path))
    with pytest.raises(ConfigError, match=r"transformers cannot open model\.name='.*'"):
        TransformersBlueprint(section, ids=257, seq_length=32)


def test_adapters_for_layers_that_are_not_there_are_refused(local: LocalMesh, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="needs the extra hf")
    section = hub_section("qwen3", lora={"target_modules": ("query",)})
    with pytest.raises(ConfigError, match=r"model\.lora\.target_modules=\['query'\]"):
        trained_with(section, local, tmp_path)
