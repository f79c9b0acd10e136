from __future__ import annotations

import json

import pytest

from zeroband.config import load_config
from zeroband.config.presets import preset_names
from zeroband.config.recorded import other_items, recorded_config, shared_flags
from zeroband.config.shared import shared_digest, shared_items
from zeroband.errors import ConfigError

STORE = {"ZERO_BAND_STORE__URL": "redis://localhost"}
MIXTURE = [
    {"name": "web", "weight": 3.0, "source": {"type": "text", "paths": ["a"]}},
    {"name": "code.py", "weight": 0.5, "max_passes": 2.0, "source": {"type": "text", "paths": ["b"], "binary": True}},
]


def _record(arguments: list[str]) -> dict[str, str]:
    """What a founder with these arguments writes, beside digests of its own."""
    items = shared_items(load_config(arguments, STORE))
    return {"protocol": "10", **{key: str(value) for key, value in items.items()}, "data.tokenizer (ids)": "bytes"}


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_is_read_back_from_its_record(preset: str) -> None:
    alone = preset == "debug/normal"
    founder = load_config([f"@{preset}", "--run.id", "first"], {} if alone else STORE)
    record = {key: str(value) for key, value in shared_items(founder).items()}
    own = [f"@{preset}"]  # for what nodes do not share, such as where the texts lie
    assert shared_digest(recorded_config(record, own, {} if alone else STORE)) == shared_digest(founder)


def test_what_a_node_has_for_itself_is_asked_for_by_its_key() -> None:
    record = _record(["@150M"])
    with pytest.raises(ConfigError, match=r"data\.source\.paths is missing"):
        recorded_config(record, [], STORE)
    config = recorded_config(record, ["--data.source.paths", "mine/*.parquet"], STORE)
    assert shared_digest(config) == shared_digest(load_config(["@150M"], STORE))
    assert config.data.source.paths == ("mine/*.parquet",)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "arguments",
    [
        ["@debug/diloco", "--data.sources", json.dumps(MIXTURE)],
        ["@debug/diloco", "--optim.schedule.type", "wsd", "--run.seed", "7"],
        ["@debug/sparseloco", "--outer.inner_seconds", "30"],
        ["@debug/ddp", "--rollback", "{}", "--ckpt.path", "here"],
        ["@debug/streaming", "--run.id", "none-12"],
    ],
)
def test_a_record_is_read_back_to_the_letter(arguments: list[str]) -> None:
    record = _record(arguments)
    config = recorded_config(record, ["--ckpt.path", "mine"], STORE)
    assert {key: str(value) for key, value in shared_items(config).items()}.items() <= record.items()
    assert config.ckpt.path == "mine"


def test_shared_keys_are_the_records_whatever_the_node_says() -> None:
    record = _record(["@debug/diloco", "--train.total_steps", "77"])
    environ = STORE | {"ZERO_BAND_TRAIN__TOTAL_STEPS": "8"}
    own = ["@debug/ddp", "--train.total_steps", "9", "--train.micro_bs", "2"]
    config = recorded_config(record, own, environ)
    assert (config.train.total_steps, config.train.micro_bs, config.outer and config.outer.type) == (77, 2, "diloco")


def test_other_items_are_what_no_configuration_has() -> None:
    assert other_items(_record(["@debug/diloco"])) == {"protocol": "10", "data.tokenizer (ids)": "bytes"}
    assert not [flag for flag in shared_flags(_record(["@debug/diloco"])) if "protocol" in flag or "ids" in flag]


@pytest.mark.parametrize("change", [{"train.total_steps": "077"}, {"train.batch_size": None}])
def test_a_record_that_cannot_be_read_back_is_refused_with_its_key(change: dict[str, str | None]) -> None:
    record = {**_record(["@debug/diloco"]), **change}
    kept = {key: value for key, value in record.items() if value is not None}
    with pytest.raises(ConfigError, match=next(iter(change))):
        recorded_config(kept, [], STORE)


ODD = ["[", "{", "{(1,): 2}", "[{1, 2}]", "[b'a']", "{1j: 2}", "{...}", f"[{'1+' * 3000}1]", "[[1]]", "{'a': 1}", ""]


@pytest.mark.parametrize("key", ["data.sources.web.source.type", "data.sources.web.source", "train.batch_size"])
@pytest.mark.parametrize("text", ODD)
def test_a_record_that_says_anything_is_refused_with_an_error_of_the_user(key: str, text: str) -> None:
    record = _record(["@debug/diloco", "--data.sources", json.dumps(MIXTURE)])
    with pytest.raises(ConfigError):
        recorded_config({**record, key: text}, [], STORE)


@pytest.mark.parametrize(
    "key",
    [
        *("run.dir", "run.token", "node.id", "store.url", "ckpt.path", "data.cache_dir", "observe.webhook.url"),
        *("resume.dir", "fault.inject", "export.path", "run", "node", "ckpt"),
    ],
)
def test_a_record_sets_nothing_that_each_node_sets_for_itself(key: str) -> None:
    with pytest.raises(ConfigError, match=f"names what each node sets for itself: {key}"):
        recorded_config({**_record(["@debug/diloco"]), key: '{"dir": "theirs"}'}, [], STORE)
