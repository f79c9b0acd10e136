"""What a node must agree on with the others, as its trainer is built."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.runtime.conftest import Build

from zeroband.config.data import TextSource
from zeroband.data.ledger import SHARED
from zeroband.data.tokens import Corpus
from zeroband.errors import ConfigError
from zeroband.runtime.build import TrainerParts

DEVICE = "train.device (rounds the nodes' common step)"
STORE = {"store.url": "redis://localhost"}

Own = Callable[..., TrainerParts]


@pytest.mark.parametrize(("outer", "shares_device"), [("ddp", True), ("diloco", False), ("demo", False)])
def test_nodes_agree_on_the_kind_of_device_where_they_share_steps_of_adamw_and_never_on_the_type(
    build: Build, outer: str, shares_device: bool
) -> None:
    node = build(**STORE, **{"outer.type": outer})
    assert node.shared.get(DEVICE) == ("cpu" if shares_device else None)
    assert "train.batch_size" in node.shared and not {"train.dtype", "train.device"} & node.shared.keys()


def test_nodes_that_share_steps_of_their_own_algorithm_keep_float32_moments(build: Build, tmp_path: Path) -> None:
    (path := tmp_path / "mine.py").write_text("from zeroband.outer.ddp import Ddp\n\nclass ALGORITHM(Ddp): pass\n")
    custom = {"outer.type": "custom", "outer.algorithm": path, "outer.inner_steps": 1, "optim.state_dtype": "int8"}
    with pytest.raises(ConfigError, match=r"state_dtype='int8' is for moments of a node's own.*: drop it"):
        build(**STORE, **custom)


@pytest.fixture
def own(build: Build, tmp_path: Path) -> Own:
    """own(node_id, documents, ...): a node that has this text for itself."""

    def own(node_id: str, documents: str, **changes: Any) -> TrainerParts:
        path = tmp_path / f"of-{node_id}-{len(documents)}" / "notes.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": documents * 40}) + "\n")
        source = json.dumps({"type": "jsonl", "paths": [str(path)]})
        chosen = {"outer.type": "diloco", "node.id": node_id, "run.token": "sesame", "data.source": source}
        return build(**STORE, **{**chosen, "data.private": True, **changes})

    return own


def test_nodes_with_documents_of_their_own_agree_on_all_but_these(own: Own) -> None:
    a, b = own("a", "some notes. "), own("b", "quite other ones. ")
    assert a.shared == b.shared and "data.tokenizer (ids)" in a.shared
    assert a.corpus.startswith("a/") and b.corpus.startswith("b/")
    with_tokens = {key for key, value in a.shared.items() if "notes" in value or value == a.data_fingerprint}
    assert not with_tokens and "data (tokens)" not in a.shared


def test_nodes_that_share_documents_agree_on_their_tokens(own: Own) -> None:
    node = own("a", "some notes. ", **{"data.private": False})
    assert (node.shared["data (tokens)"], node.corpus) == (node.data_fingerprint, SHARED)
    corpus = Corpus.of_record(node.describe_model().data)
    assert corpus.data == node.config.data and corpus.fingerprint == node.data_fingerprint


@pytest.mark.slow
def test_name_of_private_documents_follows_from_them_the_node_and_the_token_alone(own: Own) -> None:
    name = own("a", "some notes. ").corpus
    assert own("a", "some notes. ", **{"run.id": "another", "run.seed": 5}).corpus == name
    others = [
        own("a", "some notes more. ").corpus,
        own("b", "some notes. ").corpus,
        own("a", "some notes. ", **{"run.token": "friend"}).corpus,
    ]
    digests = {one.partition("/")[2] for one in (name, *others)}
    assert len(digests) == 4
    assert not digests & {own("a", "some notes. ").data_fingerprint[:16]}


def test_record_of_a_model_of_private_documents_says_nothing_of_them(own: Own, tmp_path: Path) -> None:
    node = own("a", "some notes. ", **{"run.seed": 5})
    described = node.describe_model()
    corpus = Corpus.of_record(described.data)
    assert (corpus.data.source, corpus.data.cache_dir, corpus.fingerprint) == (TextSource(), None, "")
    assert (corpus.data.private, corpus.data.seq_length, corpus.seed) == (True, 16, 5)
    said = json.dumps([described.data, described.model, described.tokenizer])
    assert str(tmp_path) not in said and "notes" not in said and node.data_fingerprint not in said
