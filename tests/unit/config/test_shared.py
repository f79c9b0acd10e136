"""What nodes must agree on, and how it is read back from the record of their run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.config.conftest import STORE, Load

from zeroband.config import RunConfig, load_config
from zeroband.config.keys import dotted, is_shared, schema_keys, tables_of, variants_of
from zeroband.config.schema import Section
from zeroband.config.shared import (
    MOST_BYTES,
    foreign_keys,
    other_items,
    recorded_config,
    shared_digest,
    shared_items,
    shared_tables,
    shown,
)
from zeroband.config.sources import preset_names
from zeroband.errors import ConfigError

NODE_LOCAL_FLAGS = [
    ("--train.micro_bs", "1"),
    ("--train.dtype", "float32"),
    ("--train.device", "cpu"),
    ("--eval.every_steps", "7"),
    ("--run.dir", "/elsewhere"),
    ("--node.id", "other"),
    ("--run.token", "secret"),
    ("--data.source.paths", "/other/mount/*.txt"),
    ("--elastic.start_nodes", "4"),
    ("--observe.wandb.project", "mine"),
    ("--observe.trackio.project", "mine"),
    ("--observe.webhook.stalled_s", "60"),
    ("--observe.prometheus.port", "0"),
    ("--log_level", "DEBUG"),
    ("--fault.inject", "opened@3=SIGKILL"),
    ("--fault.grace_s", "5"),
]
SHARED_FLAGS = [
    ("run.seed", "1"),
    ("train.batch_size", "8"),
    ("train.total_steps", "8"),
    ("optim.schedule.final_ratio", "0.2"),
    ("data.seq_length", "8"),
    ("fault.lease_s", "4"),
    ("fault.store_s", "60"),
    ("comm.lanes", "2"),
    ("comm.chunk_mb", "1"),
]
DILOCO = {**STORE, "ZERO_BAND_OUTER__TYPE": "diloco"}


@pytest.mark.parametrize("flags", NODE_LOCAL_FLAGS)
def test_digest_ignores_what_nodes_may_choose(load: Load, flags: tuple[str, str]) -> None:
    changed = load(*flags)
    assert changed != load()
    assert shared_digest(changed) == shared_digest(load())


@pytest.mark.parametrize(("key", "value"), SHARED_FLAGS)
def test_digest_and_items_differ_where_a_shared_value_does(load: Load, key: str, value: str) -> None:
    ours, theirs = load(), load(f"--{key}", value)
    assert shared_digest(ours) != shared_digest(theirs)
    assert {name for name, item in shared_items(theirs).items() if item != shared_items(ours)[name]} == {key}


def test_mixture_is_the_same_in_whichever_order_it_is_written(load: Load) -> None:
    def mixed(names: str) -> RunConfig:
        sources = [{"name": name, "weight": 1, "source": {"type": "text", "paths": [name]}} for name in names]
        phases = [{"from_tokens": 9, "weights": {name: ord(name) for name in names}}]
        return load("--data.sources", json.dumps(sources), "--data.phases", json.dumps(phases))

    ours, theirs = mixed("ab"), mixed("ba")
    assert {key: str(item) for key, item in shared_items(ours).items()} == {
        key: str(item) for key, item in shared_items(theirs).items()
    }, "nodes compare what is written"
    assert shared_digest(ours) == shared_digest(theirs)


PRIVATE = ("--data.private", "true")


@pytest.mark.parametrize(
    "flags",
    [
        ("--data.source", '{"type": "jsonl", "paths": ["/a"], "field": "note"}'),
        ("--data.source", '{"type": "tokens", "path": "/a", "format": "nanogpt"}'),
        ("--data.sources", '[{"name": "a", "weight": 1, "source": {"type": "text", "paths": ["/a"]}}]'),
    ],
)
def test_sources_are_each_node_s_own_where_data_is_private(load: Load, flags: tuple[str, str]) -> None:
    assert shared_digest(load(*flags)) != shared_digest(load())
    ours, theirs = load(*PRIVATE), load(*PRIVATE, *flags)
    assert ours != theirs and shared_items(ours) == shared_items(theirs)
    assert not any(name.startswith(("data.source", "data.phases")) for name in shared_items(theirs))


@pytest.mark.parametrize(
    ("key", "value"), [("data.private", "false"), ("data.seq_length", "8"), ("data.hold_out", "0")]
)
def test_nodes_with_private_data_agree_on_all_else(load: Load, key: str, value: str) -> None:
    ours, theirs = shared_items(load(*PRIVATE)), shared_items(load(*PRIVATE, f"--{key}", value))
    assert {name for name, item in ours.items() if item != theirs.get(name)} == {key}


@pytest.mark.parametrize("steps", ["7", "none"])
def test_nodes_may_do_different_numbers_of_inner_steps(load: Load, steps: str) -> None:
    ours, theirs = load("--outer.inner_steps", "50", **DILOCO), load("--outer.inner_steps", steps, **DILOCO)
    assert ours != theirs
    assert shared_items(ours) == shared_items(theirs)


@pytest.mark.parametrize("key", ["outer.inner_seconds", "outer.straggler_deadline_s"])
def test_nodes_must_agree_on_the_time_of_a_round(load: Load, key: str) -> None:
    ours, theirs = shared_items(load(**DILOCO)), shared_items(load(f"--{key}", "30", **DILOCO))
    assert {name for name, item in theirs.items() if item != ours[name]} == {key}


def test_shared_items_hold_the_keys_of_the_chosen_variant(load: Load) -> None:
    items = shared_items(
        load("--outer.type", "diloco", "--data.source", '{"type": "parquet", "paths": ["x"]}', **STORE)
    )
    assert {name: item for name, item in items.items() if name.startswith(("outer.", "data.source."))} == {
        "outer.type": "diloco",
        "outer.weights": "tokens",
        "outer.inner_seconds": None,
        "outer.straggler_deadline_s": None,
        "outer.straggler_grace": None,
        "outer.quorum": 0.5,
        "outer.fragments": 1,
        "outer.fragment_pattern": "strided",
        "outer.overlap": 0,
        "outer.merge": "overwrite",
        "outer.alpha": 0.5,
        "outer.robust": None,
        "outer.optimizer.lr": 0.7,
        "outer.optimizer.momentum": 0.9,
        "outer.optimizer.nesterov": True,
        "outer.optimizer.momentum_warmup_rounds": 0,
        "data.source.type": "parquet",
        "data.source.column": "text",
        "data.source.binary": False,
    }


def test_shared_items_are_plain_json_values_and_hold_no_secret(load: Load) -> None:
    items = shared_items(
        load("--outer.type", "ddp", "--run.token", "hunter2", ZERO_BAND_STORE__URL="redis://:hunter3@h")
    )
    assert json.loads(json.dumps(items)) == items
    assert "hunter" not in json.dumps(items)


def test_section_that_is_off_is_an_item_of_its_own(load: Load) -> None:
    assert shared_items(load())["outer"] is None


# -- read back from a record ------------------------------------------------------------------------------------------


MIXTURE = [
    {"name": "web", "weight": 3.0, "source": {"type": "text", "paths": ["a"]}},
    {"name": "code.py", "weight": 0.5, "max_passes": 2.0, "source": {"type": "text", "paths": ["b"], "binary": True}},
]


def _record(arguments: list[str]) -> dict[str, str]:
    """What a founder with these arguments writes, without its digests."""
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
    assert not {"protocol", "data.tokenizer (ids)"} & shared_tables(_record(["@debug/diloco"])).keys()


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


def _below(sections: list[type[Section]], path: tuple[str, ...], told: bool) -> Iterator[tuple[str, bool]]:
    """Every key of these sections, and whether all nodes share it."""
    for section in sections:
        for name, field in section.model_fields.items():
            is_told, inner = told and is_shared(field), list(variants_of(field).values())
            yield dotted((*path, name)), is_told and not inner
            yield from _below(inner or tables_of(field.annotation), (*path, name), is_told)


ROWS = ("data.sources", "data.phases")
KEYS = [
    *((dotted(path), all(key.is_shared for key in keys)) for path, keys in schema_keys().keys.items()),
    *((dotted(path), False) for path in schema_keys().sections),
    *(
        (key, is_told)
        for place in ROWS
        for known in schema_keys().keys[tuple(place.split("."))]
        for key, is_told in _below(tables_of(known.field.annotation), (*place.split("."), "web"), told=True)
    ),
]


def _is_above_local(key: str) -> bool:
    sections = schema_keys().sections
    parts = tuple(key.split("."))
    return any(not is_shared(sections[parts[:n]].field) for n in range(1, len(parts) + 1) if parts[:n] in sections)


def test_a_record_sets_what_the_schema_declares_to_be_shared_and_no_other_key() -> None:
    """Over all keys of the schema, those of tables in lists too, each with a text that is not its own."""
    keys = {key for key, _ in KEYS}
    local = set(foreign_keys({**_record(["@debug/diloco"]), **dict.fromkeys(keys, "[{}]")}))
    shared = keys - local
    wanted = {key for key, is_told in KEYS if is_told and not _is_above_local(key) and key not in ROWS}
    assert shared == wanted
    assert {"run.dir", "model.file", "outer.algorithm", "ckpt.path", "fault.inject", "observe.report"} <= local
    assert {"data.sources.web.source.paths", "data.sources.web.source.path", "node.id", "data"} <= local
    assert {"train.total_steps", "data.sources.web.weight", "data.sources.web.source.type"} <= shared


def test_no_key_is_shared_in_one_variant_and_a_node_s_own_in_another() -> None:
    assert not [dotted(path) for path, keys in schema_keys().keys.items() if len({key.is_shared for key in keys}) > 1]


@pytest.mark.parametrize(
    ("variant", "key"), [("--model.type custom", "model.file"), ("--outer.type custom", "outer.algorithm")]
)
def test_a_file_of_code_is_the_one_that_is_named_here(variant: str, key: str) -> None:
    file = ["--model.file", "mine.py"] if key == "model.file" else ["--outer.algorithm", "mine.py"]
    founder = ["@debug/diloco", *variant.split(), f"--{key}", "theirs.py"]
    record = _record(founder)
    assert key not in record
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        recorded_config(record, [], STORE)
    section = getattr(recorded_config(record, file, STORE), key.partition(".")[0])
    assert str(getattr(section, key.partition(".")[2])) == "mine.py"


@pytest.mark.parametrize(
    "config", [{"attn_implementation": "a/kernel"}, {"text_config": {"_attn_implementation": "a/kernel"}}]
)
def test_a_record_names_no_code_for_transformers_to_fetch(config: dict[str, object]) -> None:
    whole = ["@debug/diloco", "--model.type", "transformers", "--model.config", '{"model_type": "llama"}']
    record = {**_record(whole), "model.config": str({"model_type": "llama", **config})}
    with pytest.raises(ConfigError, match=r"says which code to run"):
        recorded_config(record, [], STORE)


def test_tables_keep_what_this_node_sets_for_itself_and_nothing_of_the_record_s() -> None:
    mine = [{**MIXTURE[1], "weight": 9.0, "source": {"type": "text", "paths": ["mine"]}}]
    record = _record(["@debug/diloco", "--data.sources", json.dumps(MIXTURE)])
    config = recorded_config(record, ["--data.sources", json.dumps(mine)], STORE)
    rows = {row.name: (row.weight, row.source.model_dump()["paths"]) for row in config.data.sources}
    assert rows == {"web": (3.0, ()), "code.py": (0.5, ("mine",))}


def test_a_folder_of_this_machine_is_data_only_where_it_is_named_here(tmp_path: Path) -> None:
    source = ["--data.source.type", "huggingface", "--data.source.name", str(tmp_path)]
    record = _record(["@debug/diloco", *source])
    with pytest.raises(ConfigError, match="is a path on this machine"):
        recorded_config(record, [], STORE)
    assert (
        recorded_config(record, source, STORE).data.source == load_config(["@debug/diloco", *source], STORE).data.source
    )


def test_a_record_of_any_size_is_refused_in_a_short_sentence() -> None:
    with pytest.raises(ConfigError, match=f"more than {MOST_BYTES}") as caught:
        recorded_config({**_record(["@debug/diloco"]), "a": "b" * MOST_BYTES}, [], STORE)
    assert len(str(caught.value)) < 200


def test_what_a_record_says_is_shown_without_what_a_terminal_would_obey() -> None:
    assert shown("\x1b[31mred\nline") == "?[31mred?line"
    assert len(shown("a" * 10_000)) < 250


@pytest.mark.parametrize(
    ("key", "is_foreign"), [("a.", False), ("train.batch_size.", False), ("data.sources.", True), ("run.dir.", True)]
)
def test_a_key_of_any_number_of_parts_takes_no_time_of_its_square(key: str, is_foreign: bool) -> None:
    """Half a million parts: the square of them would take half an hour."""
    record = {f"{key}{'a.' * (MOST_BYTES // 2)}": "x"}
    assert bool(foreign_keys(record)) is is_foreign
    assert bool(other_items(record)) is True
