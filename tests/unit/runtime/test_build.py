"""What a node must agree on with the others, as its trainer is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroband.config import load_config
from zeroband.config.data import TextSource
from zeroband.data.ledger import SHARED
from zeroband.data.tokens import Corpus
from zeroband.elastic.membership.departure import Departure
from zeroband.node.mesh import LocalMesh
from zeroband.runtime.build import TrainerParts, build_trainer

TOKEN = "ZERO_BAND_RUN__TOKEN"
DEVICE = "train.device (rounds the nodes' common step)"
SMALL: dict[str, Any] = {
    "model.d_model": 16,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "data.seq_length": 16,
    "train.dtype": "float32",
    "data.source.type": "synthetic",
    "data.source.documents": 40,
    "store.url": "redis://localhost",
}


@pytest.mark.parametrize(("outer", "shares_device"), [("ddp", True), ("diloco", False), ("demo", False)])
def test_nodes_agree_on_the_kind_of_device_where_they_share_steps_of_adamw_and_never_on_the_type(
    local: LocalMesh, tmp_path: Path, outer: str, shares_device: bool
) -> None:
    chosen = {**SMALL, "data.cache_dir": tmp_path, "outer.type": outer}
    node = build_trainer(load_config([f"--{k}={v}" for k, v in chosen.items()], {}), local, Departure(1.0))
    node.loader.close()
    assert node.shared.get(DEVICE) == ("cpu" if shares_device else None)
    assert "train.batch_size" in node.shared and not {"train.dtype", "train.device"} & node.shared.keys()


def built(local: LocalMesh, folder: Path, node_id: str, documents: str, **changes: Any) -> TrainerParts:
    """A node that has this text; the names of `changes` have __ for the dots of keys."""
    path = folder / f"of-{node_id}-{len(documents)}" / "notes.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"text": documents * 40}) + "\n")
    chosen = {key: value for key, value in SMALL.items() if not key.startswith("data.source")}
    chosen |= {"data.cache_dir": folder / "cache", "outer.type": "diloco", "node.id": node_id, "run.token": "sesame"}
    chosen |= {"data.source": json.dumps({"type": "jsonl", "paths": [str(path)]}), "data.private": True}
    chosen |= {key.replace("__", "."): value for key, value in changes.items()}
    config = load_config([f"--{k}={v}" for k, v in chosen.items() if k != "run.token"], {TOKEN: chosen["run.token"]})
    node = build_trainer(config, local, Departure(1.0))
    node.loader.close()
    return node


def test_nodes_with_documents_of_their_own_agree_on_all_but_these(local: LocalMesh, tmp_path: Path) -> None:
    a, b = built(local, tmp_path, "a", "some notes. "), built(local, tmp_path, "b", "quite other ones. ")
    assert a.shared == b.shared and "data.tokenizer (ids)" in a.shared
    assert a.corpus.startswith("a/") and b.corpus.startswith("b/")
    with_tokens = {key for key, value in a.shared.items() if "notes" in value or value == a.data_fingerprint}
    assert not with_tokens and "data (tokens)" not in a.shared


def test_nodes_that_share_documents_agree_on_their_tokens(local: LocalMesh, tmp_path: Path) -> None:
    node = built(local, tmp_path, "a", "some notes. ", data__private=False)
    assert (node.shared["data (tokens)"], node.corpus) == (node.data_fingerprint, SHARED)
    corpus = Corpus.of_record(node.trained_on().data)
    assert corpus.data == node.config.data and corpus.fingerprint == node.data_fingerprint


@pytest.mark.slow
def test_name_of_private_documents_follows_from_them_the_node_and_the_token_alone(
    local: LocalMesh, tmp_path: Path
) -> None:
    name = built(local, tmp_path, "a", "some notes. ").corpus
    assert built(local, tmp_path, "a", "some notes. ", run__id="another", run__seed=5).corpus == name
    others = [
        built(local, tmp_path, "a", "some notes more. ").corpus,
        built(local, tmp_path, "b", "some notes. ").corpus,
        built(local, tmp_path, "a", "some notes. ", run__token="friend").corpus,
    ]
    digests = {one.partition("/")[2] for one in (name, *others)}
    assert len(digests) == 4
    assert not digests & {built(local, tmp_path, "a", "some notes. ").data_fingerprint[:16]}


def test_record_of_a_model_of_private_documents_says_nothing_of_them(local: LocalMesh, tmp_path: Path) -> None:
    node = built(local, tmp_path, "a", "some notes. ", run__seed=5)
    described = node.trained_on()
    corpus = Corpus.of_record(described.data)
    assert (corpus.data.source, corpus.data.cache_dir, corpus.fingerprint) == (TextSource(), None, "")
    assert (corpus.data.private, corpus.data.seq_length, corpus.seed) == (True, 16, 5)
    said = json.dumps([described.data, described.model, described.tokenizer])
    assert str(tmp_path) not in said and "notes" not in said and node.data_fingerprint not in said
