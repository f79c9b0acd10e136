"""The schema as dotted keys."""

from __future__ import annotations

from types import NoneType

import pytest
from pydantic import SecretStr

from zeroband.config.keys import Variant, dotted, schema_keys


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("train.micro_batch", ["train.micro_bs"]),
        ("trian.micro_bs", ["train.micro_bs"]),
        ("micro_bs", ["train.micro_bs"]),
        ("data.micro_bs", ["train.micro_bs"]),
        ("loglevel", ["log_level"]),
        ("optim.lr", ["optim.adamw.lr", "optim.muon.lr"]),
        ("outer.nesterov", ["outer.optimizer.nesterov"]),
        ("inner_stps", ["outer.inner_steps"]),
        ("modle", ["model"]),
        ("train.lr", ["outer.lr", "optim.adamw.lr", "optim.muon.lr"]),
        ("d_model", ["model.d_model"]),
        ("data.path", ["data.source.path"]),
        ("diloco", ['outer.type="diloco"']),
        ("qqqq", []),
        ("train.qqqq", []),
    ],
)
def test_nearest_key_is_like_the_wrong_one_or_has_a_last_part_like_it(wrong: str, nearest: list[str]) -> None:
    assert schema_keys().nearest(wrong) == nearest


def test_keys_know_the_variants_that_have_them() -> None:
    keys = schema_keys().keys
    assert [key.variant for key in keys["data", "source", "column"]] == [
        Variant(("data", "source"), "parquet"),
        Variant(("data", "source"), "huggingface"),
    ]
    assert [key.variant for key in keys["outer", "optimizer", "lr"]] == [Variant(("outer",), "diloco")]
    assert [key.variant for key in keys["train", "micro_bs"]] == [None]


def test_default_tag_is_that_of_the_default_section() -> None:
    sections = schema_keys().sections
    tags = {dotted(path): section.default_tag for path, section in sections.items() if "" not in section.variants}
    assert tags == {
        "model": "llama",
        "data.source": "text",
        "optim.schedule": "cosine",
        "outer": None,
        "outer.robust": None,
    }


def test_kinds_of_keys_follow_their_types() -> None:
    keys = {dotted(path): found[0] for path, found in schema_keys().keys.items()}
    secrets = {name for name, key in keys.items() if SecretStr in key.kinds}
    assert secrets == {"run.token", "run.operator_token", "store.url", "observe.webhook.url"}
    assert {name for name, key in keys.items() if tuple in key.kinds} == {
        "data.phases",
        "data.source.paths",
        "data.sources",
        "eval.sources",
        "train.profile.steps",
        "optim.adamw.betas",
        "fault.inject",
        "outer.settings",
        "model.settings",
        "model.lora.target_modules",
        "observe.webhook.events",
        "store.peers",
    }
    assert {name for name, key in keys.items() if dict in key.kinds} == {"model.config"}
    assert NoneType in keys["model.d_ff"].kinds - keys["model.d_model"].kinds
    assert bool in keys["train.compile"].kinds - keys["train.micro_bs"].kinds
    assert keys["run.seed"].is_shared and not keys["train.micro_bs"].is_shared


def test_holds_secret_is_true_of_sections_with_a_secret_in_them() -> None:
    schema = schema_keys()
    assert schema.holds_secret(("store",)) and schema.holds_secret(("run", "token"))
    assert not schema.holds_secret(("run", "id")) and not schema.holds_secret(("train",))
