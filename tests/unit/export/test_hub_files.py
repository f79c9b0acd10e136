"""Safetensors files of a directory: read into a model, and refused where they are another one's or damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from zeroband.config.model import LlamaConfig
from zeroband.errors import ConfigError
from zeroband.export.hf import hf_config
from zeroband.export.hub_files import (
    CONFIG_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    WeightFiles,
    load_weights,
    start_from,
)
from zeroband.model import Transformer, init_weights

VOCAB, USED = 64, 50
SMALL = LlamaConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24)


def model_of(seed: int, *, vocab_size: int = VOCAB, **changes: object) -> Transformer:
    model = Transformer(SMALL.model_copy(update=changes), vocab_size)
    init_weights(model, seed)
    return model


def write(model: Transformer, folder: Path, *, tensors_per_file: int | None = None) -> None:
    tensors = {name if name == "lm_head.weight" else f"model.{name}": t for name, t in model.state_dict().items()}
    if tensors_per_file is None:
        save_file(tensors, folder / WEIGHTS_FILE)
        return
    names, weight_map = list(tensors), {}
    for start in range(0, len(names), tensors_per_file):
        held = names[start : start + tensors_per_file]
        save_file({name: tensors[name] for name in held}, folder / f"model-{start}.safetensors")
        weight_map |= dict.fromkeys(held, f"model-{start}.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"n_kv_heads": None}])
@pytest.mark.parametrize("tensors_per_file", [None, 3])
def test_weights_read_back_bit_for_bit(
    changes: dict[str, object], tensors_per_file: int | None, tmp_path: Path
) -> None:
    source, target = model_of(1, **changes), model_of(2, **changes)
    write(source, tmp_path, tensors_per_file=tensors_per_file)
    load_weights(target, WeightFiles(tmp_path), used_ids=USED)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    source = model_of(1)
    with torch.no_grad():
        next(source.parameters())[1, 1] = value
    write(source, tmp_path)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight holds values that are not finite"):
        load_weights(model_of(2), WeightFiles(tmp_path), used_ids=USED)


def test_shorter_vocabulary_leaves_the_padding_as_it_was(tmp_path: Path) -> None:
    source, target, before = model_of(1, vocab_size=USED), model_of(2), model_of(2)
    write(source, tmp_path)
    load_weights(target, WeightFiles(tmp_path), used_ids=USED)
    assert torch.equal(target.embed_tokens.weight[:USED], source.embed_tokens.weight)
    assert torch.equal(target.embed_tokens.weight[USED:], before.embed_tokens.weight[USED:])


@pytest.mark.parametrize(
    ("changes", "vocab_size", "complaint"),
    [
        (
            {"d_ff": 32},
            VOCAB,
            r"model\.layers\.0\.mlp\.gate_proj\.weight has shape \[32, 16\] there and \[24, 16\] here",
        ),
        ({"n_layers": 1}, VOCAB, r"model\.layers\.1\.input_layernorm\.weight is missing"),
        ({"n_layers": 3}, VOCAB, r"model\.layers\.2\.input_layernorm\.weight has no place.* and 4 more"),
        ({"tie_embeddings": True}, VOCAB, r"lm_head\.weight is missing"),
        (
            {},
            128,
            r"model\.embed_tokens\.weight has shape \[128, 16\] there and \[64, 16\] here: .*50 ids of data\.tok",
        ),
        ({}, 49, r"model\.embed_tokens\.weight has shape \[49, 16\] there"),
    ],
)
def test_other_model_is_refused_by_tensor_and_shape(
    changes: dict[str, object], vocab_size: int, complaint: str, tmp_path: Path
) -> None:
    write(model_of(1, vocab_size=vocab_size, **changes), tmp_path)
    target, before = model_of(2), model_of(2)
    with pytest.raises(ConfigError, match=complaint):
        load_weights(target, WeightFiles(tmp_path), used_ids=USED)
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), before.parameters(), strict=True))


def test_tied_head_and_angles_in_the_files_are_left_alone(tmp_path: Path) -> None:
    target = model_of(2, tie_embeddings=True)
    tensors = {f"model.{name}": value.clone() for name, value in model_of(1, tie_embeddings=True).state_dict().items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(tensors, tmp_path / WEIGHTS_FILE)
    load_weights(target, WeightFiles(tmp_path), used_ids=USED)
    assert torch.equal(target.norm.weight, tensors["model.norm.weight"])


def test_start_from_compares_the_configurations_first(tmp_path: Path) -> None:
    write(model_of(1), tmp_path)
    record = hf_config(SMALL, vocab_size=VOCAB, seq_length=8, end_of_document=0, dtype="float32")
    (tmp_path / CONFIG_FILE).write_text(json.dumps(record | {"rope_theta": 5e5}))
    with pytest.raises(
        ConfigError, match=r"another model: model\.rope_theta is 500000\.0 there and 10000\.0 here; set"
    ):
        start_from(model_of(2), tmp_path, used_ids=USED)
    (tmp_path / CONFIG_FILE).write_text(json.dumps(record))
    target = model_of(2)
    start_from(target, tmp_path, used_ids=USED)
    assert torch.equal(target.norm.weight, model_of(1).norm.weight)
    assert torch.equal(target.embed_tokens.weight, model_of(1).embed_tokens.weight)


@pytest.mark.parametrize("content", [None, "[1]", "{"])
def test_folder_without_a_configuration_is_refused(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / CONFIG_FILE).write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        start_from(model_of(2), tmp_path, used_ids=USED)


def test_fingerprint_follows_every_byte_of_every_file(tmp_path: Path) -> None:
    write(model_of(1), tmp_path, tensors_per_file=8)
    before = WeightFiles(tmp_path).fingerprint()
    assert WeightFiles(tmp_path).fingerprint() == before
    last = max(tmp_path.glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-1] + b"\x07")
    assert WeightFiles(tmp_path).fingerprint() != before


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, f"has neither {WEIGHTS_FILE} nor {INDEX_FILE}"),
        ({"pytorch_model.bin": b"x"}, "other formats are not read: load them with transformers once"),
        ({WEIGHTS_FILE: b"x" * 100}, f"{WEIGHTS_FILE}: not a safetensors file"),
        ({INDEX_FILE: b"{"}, f"{INDEX_FILE}: not an index"),
        ({INDEX_FILE: b'{"weight_map": {"model.norm.weight": "gone.safetensors"}}'}, r"gone\.safetensors: not a safe"),
    ],
)
def test_missing_or_damaged_file_is_named(files: dict[str, bytes], complaint: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=complaint):
        WeightFiles(tmp_path).shape("model.norm.weight")
