"""An index that somebody else wrote reads no file outside of its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.unit.checkpoint.saves import stamp_of
from tests.unit.data.prepared import config_of, drawn_ids, opened, write_set
from tests.unit.data.test_token_files import write_litdata

from zeroband.checkpoint.manifest import Manifest, StoredFile, parse_manifest
from zeroband.errors import CheckpointDamaged, ConfigError
from zeroband.export.hub_files import WeightFiles

OUTSIDE = r"leads outside of the folder"


@pytest.mark.parametrize("name", ["../secret.npy", "/etc/passwd", "a/../../secret.npy", "s3://bucket/x"])
def test_shards_of_a_manifest_lie_in_its_folder(tmp_path: Path, name: str) -> None:
    write_set(tmp_path / "set", [drawn_ids(100)])
    manifest = tmp_path / "set" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["shards"][0]["name"] = name
    manifest.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"manifest\.json is not a valid manifest: .*{OUTSIDE}"):
        opened(config_of(tmp_path / "set", tmp_path / "cache"))


def test_chunks_of_litdata_lie_in_its_folder(tmp_path: Path) -> None:
    write_litdata(tmp_path / "chunks", [[drawn_ids(100).astype(np.int32)]])
    index = tmp_path / "chunks" / "index.json"
    content = json.loads(index.read_text())
    content["chunks"][0]["filename"] = "../chunk-0-0.bin"
    index.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"not an index of litdata: .*{OUTSIDE}"):
        opened(config_of(tmp_path / "chunks", tmp_path / "cache", format="litdata"))


def test_weights_of_an_index_lie_in_its_folder(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "outside.safetensors")
    (tmp_path / "model").mkdir()
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"index\.json: not an index .*{OUTSIDE}"):
        WeightFiles(tmp_path / "model")


def test_files_of_a_checkpoint_lie_in_its_folder() -> None:
    written = Manifest(stamp_of(10), {"../other/model.safetensors": StoredFile(3, "0" * 32)}).to_json()
    with pytest.raises(CheckpointDamaged, match=OUTSIDE):
        parse_manifest(written)
