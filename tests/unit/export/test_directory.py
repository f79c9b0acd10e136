"""An exported directory: what is in it, what another implementation of Llama makes of it, and what stays untouched."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.export.llama import llama_logits
from tests.unit.export.trained import TINY, trained_of

from zeroband.config import load_config
from zeroband.config.model import LlamaConfig
from zeroband.data.tokenizer import NoTokenizer
from zeroband.errors import ConfigError
from zeroband.export.directory import check_parity, write_directory
from zeroband.export.hub_files import INDEX_FILE

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
PRESETS = sorted(
    path.relative_to(CONFIGS).as_posix()
    for path in CONFIGS.rglob("*.toml")
    if "type" not in tomllib.loads(path.read_text()).get("model", {})
)


def family_of(preset: str) -> LlamaConfig:
    """The preset's model with its heads, its tie and its constants, but narrow and shallow."""
    environ = {"ZERO_BAND_STORE__URL": "redis://localhost"}
    flags = ["--outer.type=ddp"] if "[outer" not in (CONFIGS / preset).read_text() else []
    model = load_config([f"@{CONFIGS / preset}", *flags], environ).model
    return model.model_copy(update={"d_model": 4 * model.n_heads, "n_layers": 2, "d_ff": 48})


FAMILIES = tuple({family_of(preset).model_dump_json(): preset for preset in reversed(PRESETS)}.values())
"""The first preset of each of the models that they make."""


@pytest.mark.parametrize("preset", FAMILIES)
def test_another_llama_computes_the_same_logits_from_an_export_of(preset: str, tmp_path: Path) -> None:
    model = trained_of(family_of(preset))
    write_directory(model, tmp_path / "out", "float32")
    ids = torch.randint(257, (2, 24), generator=torch.Generator().manual_seed(0))
    ours = model.build(torch.device("cpu"))(ids)
    assert (ours - llama_logits(tmp_path / "out", ids)).abs().max() <= 1e-5
    assert ours.abs().max() > 0.1


def vllm_parameters(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Rows and columns of the parameters that vLLM's LlamaForCausalLM makes from a `config.json`; norms have one."""
    d, ff, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q, kv = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    shapes = {"model.embed_tokens": (vocab, d), "model.norm": (d, 1)}
    for layer in range(config["num_hidden_layers"]):
        inside = {
            "self_attn.qkv_proj": (q + 2 * kv, d),
            "self_attn.o_proj": (d, q),
            "mlp.gate_up_proj": (2 * ff, d),
            "mlp.down_proj": (d, ff),
            "input_layernorm": (d, 1),
            "post_attention_layernorm": (d, 1),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head": (vocab, d)}


@pytest.mark.parametrize("preset", FAMILIES)
def test_export_fills_every_parameter_that_vllm_makes_of(preset: str, tmp_path: Path) -> None:
    """As its documentation and its loader have it (docs/export.md); vLLM itself does not run here."""
    write_directory(trained_of(family_of(preset)), tmp_path / "out", "bfloat16", max_bytes=4096)
    config, index, generation, tokenizer = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", INDEX_FILE, "generation_config.json", "tokenizer_config.json")
    )
    assert config["architectures"] == ["LlamaForCausalLM"] and config["model_type"] == "llama"  # which class it takes
    assert config["hidden_act"] == "silu" and config["rope_theta"] > 0  # it has no other activation
    assert config["torch_dtype"] == "bfloat16"  # with which `--dtype auto` computes
    assert generation["eos_token_id"] == config["eos_token_id"]  # ends a completion
    assert tokenizer["tokenizer_class"] == "PreTrainedTokenizerFast"
    weights = sorted((tmp_path / "out").glob("*.safetensors"))
    assert {file.name for file in weights} == set(index["weight_map"].values())  # it reads those that both have
    fused = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
    fused |= dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
    filled: dict[str, int] = {}
    for file in weights:
        for name, tensor in load_file(file).items():
            *place, kind = name.removesuffix(".weight").split(".")
            target = ".".join([*place, fused.get(kind, kind)])
            filled[target] = filled.get(target, 0) + tensor.numel()
            assert tensor.ndim == 1 or tensor.shape[1] == vllm_parameters(config)[target][1]
    assert filled == {name: rows * columns for name, (rows, columns) in vllm_parameters(config).items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "dtype"),
    [
        ("14M.toml", "float32"),  # untied
        ("1B.toml", "float32"),  # grouped queries
        ("10B.toml", "bfloat16"),
        ("demo.toml", "float32"),  # tied
    ],
)
def test_transformers_computes_the_same_logits_from_an_export_of(preset: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    model = trained_of(family_of(preset))
    write_directory(model, tmp_path / "out", dtype, max_bytes=20_000)
    assert (tmp_path / "out" / INDEX_FILE).exists()
    parity = check_parity(model, tmp_path / "out", dtype)
    assert parity is not None and parity.is_equal
    assert parity.difference <= 1e-5 and parity.largest > 0.1


@pytest.mark.slow
def test_parity_sees_other_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    write_directory(trained_of(TINY, seed=2), tmp_path / "out", "float32")
    parity = check_parity(trained_of(TINY), tmp_path / "out", "float32")
    assert parity is not None and not parity.is_equal
    assert parity.difference > 1e-3 and parity.texts_differ == ()


@pytest.mark.slow
def test_parity_sees_a_tokenizer_that_gives_other_ids(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    model = trained_of(TINY)
    write_directory(model, tmp_path / "out", "float32")
    path, strip = tmp_path / "out" / "tokenizer.json", {"type": "Strip", "strip_left": True, "strip_right": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": strip}))
    parity = check_parity(model, tmp_path / "out", "float32")
    assert parity is not None and not parity.is_equal
    assert parity.difference <= 1e-5 and len(parity.texts_differ) == 2


def test_parity_is_not_checked_without_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert check_parity(trained_of(TINY), tmp_path, "float32") is None


def test_export_has_every_file_and_its_size(tmp_path: Path) -> None:
    size = write_directory(trained_of(TINY), tmp_path / "deep" / "out", "bfloat16")
    files = {path.name: path.stat().st_size for path in (tmp_path / "deep" / "out").iterdir()}
    assert sorted(files) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip
    assert size == sum(files.values())
    assert len({path.stat().st_mode for path in (tmp_path / "deep" / "out").iterdir()}) == 1
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "out"]


def test_weights_are_cut_into_files_below_the_limit_with_an_index(tmp_path: Path) -> None:
    model = trained_of(TINY)
    write_directory(model, tmp_path / "out", "bfloat16", max_bytes=4096)
    index = json.loads((tmp_path / "out" / INDEX_FILE).read_text())
    files = {path.name: load_file(path) for path in sorted((tmp_path / "out").glob("*.safetensors"))}
    assert next(iter(files)) == f"model-00001-of-{len(files):05d}.safetensors"
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    sizes = [sum(2 * tensor.numel() for tensor in tensors.values()) for tensors in files.values()]
    assert sum(sizes) == index["metadata"]["total_size"]
    alone = [size for size, tensors in zip(sizes, files.values(), strict=True) if len(tensors) == 1]
    assert all(size <= 4096 or size in alone for size in sizes)
    assert 2 < len(files) < len(index["weight_map"])


def test_bfloat16_weights_are_those_of_training_rounded_once(tmp_path: Path) -> None:
    model = trained_of(TINY)
    write_directory(model, tmp_path / "out", "bfloat16")
    for name, written in load_file(tmp_path / "out" / "model.safetensors").items():
        assert torch.equal(written, model.read(name.removeprefix("model.")).bfloat16())
    rounded = model.build(torch.device("cpu"), rounded_to=torch.bfloat16)
    assert torch.equal(rounded.embed_tokens.weight, model.read("embed_tokens.weight").bfloat16().float())


def test_export_names_the_end_of_document_and_the_length_of_training(tmp_path: Path) -> None:
    write_directory(trained_of(TINY, seq_length=48), tmp_path / "out", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (config["eos_token_id"], generation["eos_token_id"]) == (256, 256)
    assert config["max_position_embeddings"] == 48


def test_export_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"out exists already, and an export never overwrites"):
        write_directory(trained_of(TINY), tmp_path / "out", "float32")
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


def test_export_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot write the export to .*file/out"):
        write_directory(trained_of(TINY), tmp_path / "file" / "out", "float32")


def test_model_of_made_up_ids_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    model = replace(trained_of(TINY), tokenizer=NoTokenizer(320))
    with pytest.raises(ConfigError, match="its ids have no text"):
        write_directory(model, tmp_path / "out", "float32")
    assert list(tmp_path.iterdir()) == []
