"""Rules of the schema that no single value breaks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from zeroband.config.model import LlamaConfig
from zeroband.config.outer import DilocoConfig, SparseLocoConfig
from zeroband.config.schema import FaultConfig, RunConfig
from zeroband.config.time_outs import TimeOuts
from zeroband.config.training import TrainConfig

MADE_UP = {"type": "synthetic-tokens"}
MADE_UP_PART = {"name": "a", "weight": 1, "source": MADE_UP}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"d_model": 10, "n_heads": 4}, "model.d_model=10 is not a multiple of model.n_heads=4"),
        ({"d_model": 12, "n_heads": 4}, "model.d_model / model.n_heads = 3 is odd"),
        ({"d_model": 64, "n_heads": 8, "n_kv_heads": 3}, "model.n_heads=8 is not a multiple of model.n_kv_heads=3"),
    ],
)
def test_heads_that_do_not_divide_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LlamaConfig(**sizes)


def test_sizes_left_out_follow_from_the_others() -> None:
    assert (LlamaConfig(d_model=128).kv_heads, LlamaConfig(d_model=128).ff_width) == (4, 384)
    assert (LlamaConfig(n_kv_heads=2).kv_heads, LlamaConfig(d_ff=100).ff_width) == (2, 100)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"source": MADE_UP}}, "data.source.type='synthetic-tokens' needs data.vocab_size"),
        ({"observe": {"sample_prompt": "a"}}, "observe.sample_prompt needs a tokenizer, and the ids"),
        ({"export": {}}, re.escape("[export] needs a tokenizer, and the ids")),
        ({"data": {"source": MADE_UP, "vocab_size": 9, "private": True}}, "data.private is for documents"),
    ],
)
def test_made_up_tokens_are_refused_without_a_vocabulary_and_where_text_is_needed(
    settings: dict[str, Any], message: str
) -> None:
    data = {"source": MADE_UP, "vocab_size": 1000}
    RunConfig.model_validate({"data": data})
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate({"data": data, **settings})


def test_muon_is_refused_where_steps_are_signs_and_empty_is_enough_for_it() -> None:
    store, muon = {"url": "redis://localhost"}, {"muon": {}}
    config = RunConfig.model_validate({"outer": {"type": "ddp"}, "store": store, "optim": muon})
    assert config.optim.muon is not None and config.optim.muon.lr is None
    with pytest.raises(ValidationError, match=re.escape("has no inner optimizer: drop [optim.muon]")):
        RunConfig.model_validate({"outer": {"type": "demo"}, "store": store, "optim": muon})


def test_time_outs_follow_detect_s() -> None:
    assert FaultConfig(detect_s=60.0).time_outs == TimeOuts(
        detect_s=60.0, lease_s=60.0, renew_s=12.0, watch_s=0.25, hung_s=1440.0, transfer_s=7200.0, store_s=7200.0
    )
    assert FaultConfig(detect_s=0.5).time_outs == TimeOuts(
        detect_s=0.5, lease_s=0.5, renew_s=0.1, watch_s=0.05, hung_s=300.0, transfer_s=600.0, store_s=3600.0
    )


def test_time_outs_follow_one_that_is_set() -> None:
    assert FaultConfig(lease_s=3.0).time_outs.renew_s == 0.6
    assert FaultConfig(hung_s=900.0).time_outs.transfer_s == 1800.0


@given(detect_s=st.floats(0.5, 600.0))
def test_time_outs_derived_from_detect_s_are_in_order(detect_s: float) -> None:
    t = FaultConfig(detect_s=detect_s).time_outs
    assert t.watch_s <= t.detect_s / 2
    assert 3 * t.renew_s < t.lease_s <= t.detect_s < t.hung_s < t.transfer_s <= t.store_s


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"lease_s": 6.0}, "fault.lease_s=6 is above fault.detect_s=5;"),
        ({"detect_s": 2.0, "lease_s": 3.0}, "fault.lease_s=3 is above fault.detect_s=2;"),
        ({"renew_s": 2.0}, "fault.renew_s=2 is above fault.lease_s / 3=1.66667;"),
        ({"lease_s": 3.0, "renew_s": 1.5}, "fault.renew_s=1.5 is above fault.lease_s / 3=1;"),
        ({"watch_s": 3.0}, "fault.watch_s=3 is above fault.detect_s / 2=2.5;"),
        ({"detect_s": 10.0, "hung_s": 9.0}, "fault.detect_s=10 is above fault.hung_s=9;"),
        ({"hung_s": 900.0, "transfer_s": 700.0}, "fault.hung_s=900 is above fault.transfer_s=700;"),
        ({"transfer_s": 200.0}, "fault.hung_s=300 is above fault.transfer_s=200;"),
        ({"store_s": 1.0}, "fault.detect_s=5 is above fault.store_s=1;"),
    ],
)
def test_time_outs_that_contradict_each_other_are_refused_with_both_names(
    overrides: dict[str, float], message: str
) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        FaultConfig(**overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        {"lease_s": 5.0},
        {"lease_s": 3.0},
        {"renew_s": 0.5},
        {"watch_s": 2.5},
        {"detect_s": 300.0, "hung_s": 300.0},
        {"hung_s": 300.0, "transfer_s": 300.0},
        {"store_s": 5.0},
    ],
)
def test_time_outs_may_be_set_within_their_order(overrides: dict[str, float]) -> None:
    time_outs = FaultConfig(**overrides).time_outs
    assert {name: getattr(time_outs, name) for name in overrides} == overrides


@pytest.mark.parametrize("name", ["lease_s", "renew_s", "watch_s", "hung_s", "transfer_s", "store_s", "grace_s"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_time_out_that_is_no_time_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValidationError, match=name):
        FaultConfig(**{name: value})


@pytest.mark.parametrize("detect_s", [0.4, 601.0, float("nan")])
def test_detect_s_out_of_its_range_is_refused(detect_s: float) -> None:
    with pytest.raises(ValidationError, match="detect_s"):
        FaultConfig(detect_s=detect_s)


@pytest.mark.parametrize(
    ("keys", "most"),
    [
        ({}, 500),
        ({"inner_steps": 7}, 7),
        ({"inner_seconds": 60.0}, 1_000_000),
        ({"inner_steps": 7, "inner_seconds": 60.0}, 7),
    ],
)
def test_round_of_diloco_is_limited_by_steps_unless_only_its_time_is_given(keys: dict[str, Any], most: int) -> None:
    assert DilocoConfig(type="diloco", **keys).phase_steps == most


def test_round_of_sparseloco_is_shorter() -> None:
    assert SparseLocoConfig(type="sparseloco").phase_steps == 30
    assert SparseLocoConfig(type="sparseloco", inner_seconds=60.0).phase_steps == 1_000_000


def test_rounds_of_diloco_have_no_time_and_wait_for_everybody_unless_told() -> None:
    config = DilocoConfig(type="diloco")
    assert (config.inner_steps, config.inner_seconds, config.straggler_deadline_s) == (None, None, None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"inner_steps": 100, "fragments": 8},
            "inner_steps=100 is not a multiple of outer.fragments=8; nearest: 96 or 104",
        ),
        ({"inner_steps": 4, "fragments": 8}, "nearest: 8"),
        ({"inner_seconds": 5, "fragments": 2}, "fragments=2 needs a fixed outer.inner_steps"),
        ({"inner_seconds": 5, "overlap": 3}, 'overlap=3 counts steps .* set it to "full" or 0'),
        ({"inner_steps": 8, "fragments": 4, "overlap": 3}, "overlap=3 is longer than inner_steps / fragments = 2"),
        ({"merge": "eager"}, 'has no effect where training waits .* set outer.overlap = "full"'),
        (
            {"inner_steps": 8, "straggler_grace": 0.1, "fragments": 2, "overlap": "full", "merge": "eager"},
            'do not go with outer.merge = "eager" of fragments: .* set outer.merge = "mix"',
        ),
    ],
)
def test_overlap_that_cannot_be_is_refused_with_a_way_out(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DilocoConfig.model_validate({"type": "diloco", **settings})


def test_eager_updates_of_values_that_are_divided_by_their_senders_are_refused_with_a_way_out() -> None:
    settings = {"type": "sparseloco", "overlap": "full", "merge": "eager"}
    with pytest.raises(ValueError, match=r'set outer\.divisor = "members"'):
        SparseLocoConfig.model_validate(settings)
    assert SparseLocoConfig.model_validate(settings | {"divisor": "members"}).divisor == "members"


@pytest.mark.parametrize(
    ("settings", "phase_steps", "overlap_steps"),
    [
        ({}, 500, 0),
        ({"inner_steps": 8, "fragments": 4, "overlap": 1}, 2, 1),
        ({"inner_steps": 8, "fragments": 4, "overlap": 2}, 2, None),
        ({"inner_steps": 8, "overlap": "full"}, 8, None),
        ({"inner_seconds": 8, "overlap": "full"}, 1_000_000, None),
    ],
)
def test_overlap_of_a_whole_phase_ends_with_the_next_one(
    settings: dict[str, object], phase_steps: int, overlap_steps: int | None
) -> None:
    config = DilocoConfig.model_validate({"type": "diloco", **settings})
    assert (config.phase_steps, config.overlap_steps) == (phase_steps, overlap_steps)


@pytest.mark.parametrize("key", ["inner_steps", "inner_seconds", "straggler_deadline_s"])
@pytest.mark.parametrize("value", [0, -1])
def test_round_of_diloco_without_steps_or_time_is_refused(key: str, value: int) -> None:
    with pytest.raises(ValidationError, match=key):
        DilocoConfig(type="diloco", **{key: value})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"profile": {"steps": (15, 10)}}, r"train.profile.steps=\[15, 10\] ends before it begins; set \[10, 15\]"),
        ({"profile": {"steps": (0, 3)}}, "greater than 0"),
        ({"profile": {"steps": (3,)}}, "steps.1"),
        ({"profile": {}, "total_steps": 14}, "ends after the last step, train.total_steps=14"),
        ({"float8": "rowwise", "dtype": "float32"}, "train.float8='rowwise' needs train.dtype = \"bfloat16\""),
        ({"float8": "e4m3"}, "tensorwise"),
    ],
)
def test_profile_and_float8_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TrainConfig(**arguments)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"data": {"seq_length": 1000}}, "data.seq_length to be a multiple of 16, not 1000"),
        (
            {"model": {"type": "llama", "d_model": 40, "n_heads": 4, "d_ff": 64}},
            "model.d_model to be a multiple of 16, not 40",
        ),
        ({"model": {"type": "llama", "d_ff": 100}}, "model.d_ff to be a multiple of 16, not 100"),
        (
            {"model": {"type": "llama", "d_model": 96, "n_heads": 12, "n_kv_heads": 1}},
            "model.n_kv_heads times the head size to be a multiple of 16, not 8",
        ),
    ],
)
def test_float8_needs_sizes_that_tensor_cores_take(sizes: dict[str, Any], message: str) -> None:
    RunConfig(**sizes)
    with pytest.raises(ValidationError, match=message):
        RunConfig(**sizes, train={"float8": "tensorwise"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"eval": {}, "data": {"hold_out": 0}},
            r"\[eval\] has nothing to evaluate on: data.hold_out=0 keeps no sample",
        ),
        ({"eval": {"sources": ["wiki"]}}, "eval.sources: 'wiki' is no NAME=PATH"),
        ({"eval": {"sources": ["a b=/x"]}}, "eval.sources: 'a b=/x' is no NAME=PATH"),
        ({"eval": {"sources": ["a=/x", "a=/y"]}}, "eval.sources names 'a' twice"),
        (
            {"eval": {"sources": ["a=/x"]}, "data": {"source": MADE_UP, "vocab_size": 50}},
            "eval.sources needs a tokenizer",
        ),
        (
            {"eval": {"sources": ["b=/x"]}, "data": {"sources": [MADE_UP_PART], "vocab_size": 50}},
            "eval.sources needs a tokenizer",
        ),
    ],
)
def test_evaluation_of_nothing_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(settings)


def test_sources_of_an_evaluation_are_read_as_those_of_a_mixture_are() -> None:
    like = {"type": "jsonl", "paths": ["/train.jsonl"], "field": "body"}
    parts = [{"name": name, "weight": 1, "source": source} for name, source in (("t", {"type": "text"}), ("j", like))]
    config = RunConfig.model_validate({"eval": {"sources": ["wiki=/w.jsonl"]}, "data": {"sources": parts}})
    assert config.eval is not None
    seen = config.eval.data_of(config.data)["wiki"].source.model_dump()
    assert (seen["type"], seen["field"], seen["paths"]) == ("jsonl", "body", ("/w.jsonl",))


@pytest.mark.parametrize("path", ["s3://b/set/", "s3://b/set/manifest.json", "/data/set/"])
def test_folder_of_an_evaluation_is_a_prepared_set(path: str) -> None:
    config = RunConfig.model_validate({"eval": {"sources": [f"web={path}"]}})
    assert config.eval is not None
    source = config.eval.data_of(config.data)["web"].source
    assert (source.type, source.path) == ("tokens", path.removesuffix("manifest.json"))


def test_sources_of_an_evaluation_are_read_by_the_ending_of_their_names() -> None:
    like = {"type": "jsonl", "paths": ["/train.jsonl"], "field": "body"}
    paths = ["wiki=/w/*.jsonl.zst", "books=s3://b/x.parquet", "code=/c/*.py", "odd=/a=b.txt"]
    config = RunConfig.model_validate({"eval": {"sources": paths}, "data": {"source": like, "hold_out": 0}})
    assert config.eval is not None
    seen = {name: data.source.model_dump() for name, data in config.eval.data_of(config.data).items()}
    assert {name: source["type"] for name, source in seen.items()} == {
        "wiki": "jsonl",
        "books": "parquet",
        "code": "text",
        "odd": "text",
    }
    assert (seen["wiki"]["field"], seen["wiki"]["paths"], seen["odd"]["paths"]) == (
        *("body", ("/w/*.jsonl.zst",), ("/a=b.txt",)),
    )


A, B = (
    '{"name": "a", "weight": 1, "source": {"type": "text"}}',
    '{"name": "b", "weight": 2, "source": {"type": "text"}}',
)
LIMITED = '{"name": "c", "weight": 1, "max_passes": 2, "source": {"type": "text"}}'


@pytest.mark.parametrize(
    ("sources", "more", "message"),
    [
        ('[{"name": "a", "weigth": 1, "source": {"type": "text"}}]', (), "unknown key data.sources[0].weigth (from "),
        ('[{"name": "a", "weight": 1}]', (), "data.sources[0].source is missing"),
        (f'[{A}, {{"name": "a b", "weight": 1, "source": {{"type": "text"}}}}]', (), "data.sources[1].name='a b'"),
        ('[{"name": "a", "weight": 1, "source": {"type": "parquet"}}]', (), "data.sources[0].source.paths is missing"),
        ('[{"name": "a", "weight": 1, "source": {"type": "texts"}}]', (), "data.sources[0].source.type='texts'"),
        ('[{"name": "a", "weight": 0, "source": {"type": "text"}}]', (), "data.sources[0].weight=0"),
        (f"[{A}, {A}]", (), "data.sources names 'a' twice"),
        (f"[{A}]", ("--data.source.type", "synthetic"), "data.source and data.sources are both set"),
        (f"[{A}]", ("--data.source.paths", "x"), 'by data.source.type = "text" and data.source.paths = []'),
        (f"[{LIMITED}]", (), "data.sources all have max_passes, so data may end"),
        (f"[{A}, {B}]", ("--data.phases", '[{"from_tokens": 9, "weights": {"a": 1}}]'), "must name all of a, b"),
        (
            f"[{A}, {LIMITED}]",
            ("--data.phases", '[{"from_tokens": 9, "weights": {"a": 0, "c": 1}}]'),
            "all sources with a weight in",
        ),
        (
            f"[{A}]",
            ("--data.phases", '[{"from_tokens": 9, "weights": {"a": 1}}, {"from_tokens": 9, "weights": {"a": 1}}]'),
            "data.phases must ascend by from_tokens",
        ),
        (
            f"[{A}, {LIMITED.replace('1', '1e-10')}]",
            (),
            "data.sources, c: weight=1e-10 of 1 is less than one sample in 2147483647",
        ),
        (
            f"[{A}, {LIMITED}]",
            ("--data.phases", '[{"from_tokens": 9, "weights": {"a": 1e10, "c": 1}}]'),
            "data.sources, c: weight=1 of 1e+10 is less than",
        ),
        (
            '[{"name": "a", "weight": 1, "source": {"type": "text", "binary": true}}]',
            ("--data.tokenizer", "gpt2"),
            'needs data.tokenizer = "byte"',
        ),
        (f'[{A}, {{"name": "m", "weight": 1, "source": {{"type": "synthetic-tokens"}}}}]', (), "mix with nothing else"),
        ('[{"name": "m", "weight": 1, "source": {"type": "synthetic-tokens"}}]', (), "needs data.vocab_size"),
    ],
)
def test_mixtures_that_cannot_be_are_refused(
    refusal: Callable[..., str], sources: str, more: tuple[str, ...], message: str
) -> None:
    assert message in refusal("--data.sources", sources, *more)


def test_name_of_a_source_is_one_of_training_or_of_evaluation(refusal: Callable[..., str]) -> None:
    said = refusal("--data.sources", f"[{A}, {B}]", "--eval.sources", "a=x.txt")
    assert said.startswith("'a' is a name in eval.sources and in data.sources")


def test_phases_without_sources_are_refused(refusal: Callable[..., str]) -> None:
    assert "there are none" in refusal("--data.phases", '[{"from_tokens": 9, "weights": {"a": 1}}]')


def test_each_source_of_a_mixture_is_a_section_of_its_own(load: Callable[..., RunConfig]) -> None:
    mixed = load("--data.sources", f"[{A}, {LIMITED}]", "--data.seq_length", "7").data
    assert list(mixed.parts) == ["a", "c"] and all(part.seq_length == 7 for part in mixed.parts.values())
    assert not any(part.sources for part in mixed.parts.values())
    alone = load().data
    assert dict(alone.parts) == {"": alone}


def test_site_needs_a_data_path_that_knows_sites() -> None:
    joined = {"store": {"url": "redis://host:6379"}, "outer": {"type": "diloco"}, "node": {"site": "lab-a"}}
    assert RunConfig.model_validate(joined).node.site == "lab-a"
    with pytest.raises(ValidationError, match=r"node\.site='lab-a' needs comm\.backend = \"native\""):
        RunConfig.model_validate({**joined, "comm": {"backend": "gloo"}})
    with pytest.raises(ValidationError, match=r"node\.site='lab-a' and comm\.sites=\"off\" contradict one another"):
        RunConfig.model_validate({**joined, "comm": {"sites": "off"}})
