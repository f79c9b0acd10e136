"""Safetensors files of a directory: written in one or several, read back, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from zeroband.config.schema import ModelConfig
from zeroband.errors import ConfigError
from zeroband.model import Transformer, init_weights
from zeroband.model.weights import INDEX_FILE, WEIGHTS_FILE, WeightFiles, load_weights, write_weights

VOCAB, USED = 64, 50
SMALL = ModelConfig(d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24)


def model_of(seed: int, *, vocab_size: int = VOCAB, **changes: object) -> Transformer:
    model = Transformer(SMALL.model_copy(update=changes), vocab_size)
    init_weights(model, seed)
    return model


def write(model: Transformer, folder: Path, *, shard_bytes: int = 1 << 30) -> list[str]:
    state = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    written = write_weights(folder, shapes, state.__getitem__, torch.float32, shard_bytes=shard_bytes)
    return [path.name for path in written]


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"n_kv_heads": None}])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 4000])
def test_weights_read_back_bit_for_bit(changes: dict[str, object], shard_bytes: int, tmp_path: Path) -> None:
    source, target = model_of(1, **changes), model_of(2, **changes)
    write(source, tmp_path, shard_bytes=shard_bytes)
    load_weights(target, WeightFiles(tmp_path), used_ids=USED)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))


def test_small_model_is_one_file_without_an_index(tmp_path: Path) -> None:
    assert write(model_of(1), tmp_path) == [WEIGHTS_FILE]
    assert "model.layers.1.mlp.up_proj.weight" in load_file(tmp_path / WEIGHTS_FILE)


def test_large_model_is_cut_into_files_below_the_limit_with_an_index(tmp_path: Path) -> None:
    model = model_of(1)
    files = write(model, tmp_path, shard_bytes=4096)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert files[-1] == INDEX_FILE and files[0] == f"model-00001-of-{len(files) - 1:05d}.safetensors"
    assert set(index["weight_map"].values()) == set(files[:-1])
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in model.parameters())
    sizes = [sum(4 * t.numel() for t in load_file(tmp_path / file).values()) for file in files[:-1]]
    assert max(sizes) <= 4096 and len(sizes) > 2


def test_tensor_above_the_limit_has_a_file_of_its_own(tmp_path: Path) -> None:
    files = write(model_of(1), tmp_path, shard_bytes=1)
    assert all(len(load_file(tmp_path / file)) == 1 for file in files[:-1])


def test_tensors_of_one_buffer_are_written(tmp_path: Path) -> None:
    flat = torch.arange(10.0)
    parts = {"norm.weight": flat[:4], "lm_head.weight": flat[4:].view(3, 2)}
    write_weights(tmp_path, {"norm.weight": (4,), "lm_head.weight": (3, 2)}, parts.__getitem__, torch.float32)
    assert load_file(tmp_path / WEIGHTS_FILE)["lm_head.weight"].flatten().tolist() == flat[4:].tolist()


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
