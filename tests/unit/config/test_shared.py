"""What nodes must agree on."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from zeroband.config import RunConfig
from zeroband.config.shared import shared_digest, shared_items

STORE = {"ZERO_BAND_STORE__URL": "redis://localhost:6379"}
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
def test_digest_ignores_what_nodes_may_choose(load: Callable[..., RunConfig], flags: tuple[str, str]) -> None:
    changed = load(*flags)
    assert changed != load()
    assert shared_digest(changed) == shared_digest(load())


@pytest.mark.parametrize(("key", "value"), SHARED_FLAGS)
def test_digest_and_items_differ_where_a_shared_value_does(
    load: Callable[..., RunConfig], key: str, value: str
) -> None:
    ours, theirs = load(), load(f"--{key}", value)
    assert shared_digest(ours) != shared_digest(theirs)
    assert {name for name, item in shared_items(theirs).items() if item != shared_items(ours)[name]} == {key}


def test_mixture_is_the_same_in_whichever_order_it_is_written(load: Callable[..., RunConfig]) -> None:
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
def test_sources_are_each_node_s_own_where_data_is_private(
    load: Callable[..., RunConfig], flags: tuple[str, str]
) -> None:
    assert shared_digest(load(*flags)) != shared_digest(load())
    ours, theirs = load(*PRIVATE), load(*PRIVATE, *flags)
    assert ours != theirs and shared_items(ours) == shared_items(theirs)
    assert not any(name.startswith(("data.source", "data.phases")) for name in shared_items(theirs))


@pytest.mark.parametrize(
    ("key", "value"), [("data.private", "false"), ("data.seq_length", "8"), ("data.hold_out", "0")]
)
def test_nodes_with_private_data_agree_on_all_else(load: Callable[..., RunConfig], key: str, value: str) -> None:
    ours, theirs = shared_items(load(*PRIVATE)), shared_items(load(*PRIVATE, f"--{key}", value))
    assert {name for name, item in ours.items() if item != theirs.get(name)} == {key}


@pytest.mark.parametrize("steps", ["7", "none"])
def test_nodes_may_do_different_numbers_of_inner_steps(load: Callable[..., RunConfig], steps: str) -> None:
    ours, theirs = load("--outer.inner_steps", "50", **DILOCO), load("--outer.inner_steps", steps, **DILOCO)
    assert ours != theirs
    assert shared_items(ours) == shared_items(theirs)


@pytest.mark.parametrize("key", ["outer.inner_seconds", "outer.straggler_deadline_s"])
def test_nodes_must_agree_on_the_time_of_a_round(load: Callable[..., RunConfig], key: str) -> None:
    ours, theirs = shared_items(load(**DILOCO)), shared_items(load(f"--{key}", "30", **DILOCO))
    assert {name for name, item in theirs.items() if item != ours[name]} == {key}


def test_shared_items_hold_the_keys_of_the_chosen_variant(load: Callable[..., RunConfig]) -> None:
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


def test_shared_items_are_plain_json_values_and_hold_no_secret(load: Callable[..., RunConfig]) -> None:
    items = shared_items(
        load("--outer.type", "ddp", "--run.token", "hunter2", ZERO_BAND_STORE__URL="redis://:hunter3@h")
    )
    assert json.loads(json.dumps(items)) == items
    assert "hunter" not in json.dumps(items)


def test_section_that_is_off_is_an_item_of_its_own(load: Callable[..., RunConfig]) -> None:
    assert shared_items(load())["outer"] is None
