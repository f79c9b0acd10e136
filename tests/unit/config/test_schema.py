"""Rules of the schema that no single value breaks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.config.conftest import Load

from zeroband.config.model import LlamaConfig
from zeroband.config.outer import DilocoConfig, SparseLocoConfig
from zeroband.config.schema import FaultConfig, RunConfig
from zeroband.config.time_outs import TimeOuts
from zeroband.config.training import Placement, TrainConfig, placement


def test_sizes_left_out_follow_from_the_others() -> None:
    assert (LlamaConfig(d_model=128).kv_heads, LlamaConfig(d_model=128).ff_width) == (4, 384)
    assert (LlamaConfig(n_kv_heads=2).kv_heads, LlamaConfig(d_ff=100).ff_width) == (2, 100)


def test_time_outs_follow_detect_s() -> None:
    assert FaultConfig(detect_s=60.0).time_outs == TimeOuts(
        detect_s=60.0, lease_s=60.0, renew_s=12.0, watch_s=0.25, hung_s=1440.0, gloo_timeout_s=7200.0, store_s=7200.0
    )
    assert FaultConfig(detect_s=0.5).time_outs == TimeOuts(
        detect_s=0.5, lease_s=0.5, renew_s=0.1, watch_s=0.05, hung_s=300.0, gloo_timeout_s=600.0, store_s=3600.0
    )


def test_time_outs_follow_one_that_is_set() -> None:
    assert FaultConfig(lease_s=3.0).time_outs.renew_s == 0.6
    assert FaultConfig(hung_s=900.0).time_outs.gloo_timeout_s == 1800.0


@given(detect_s=st.floats(0.5, 600.0))
def test_time_outs_derived_from_detect_s_are_in_order(detect_s: float) -> None:
    t = FaultConfig(detect_s=detect_s).time_outs
    assert t.watch_s <= t.detect_s / 2
    assert 3 * t.renew_s < t.lease_s <= t.detect_s < t.hung_s < t.gloo_timeout_s <= t.store_s


@pytest.mark.parametrize(
    "overrides",
    [
        {"lease_s": 5.0},
        {"lease_s": 3.0},
        {"renew_s": 0.5},
        {"watch_s": 2.5},
        {"detect_s": 300.0, "hung_s": 300.0},
        {"hung_s": 300.0, "gloo_timeout_s": 300.0},
        {"store_s": 5.0},
    ],
)
def test_time_outs_may_be_set_within_their_order(overrides: dict[str, float]) -> None:
    time_outs = FaultConfig(**overrides).time_outs
    assert {name: getattr(time_outs, name) for name in overrides} == overrides


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


def test_each_source_of_a_mixture_is_a_section_of_its_own(load: Load) -> None:
    mixed = load("--data.sources", f"[{A}, {LIMITED}]", "--data.seq_length", "7").data
    assert list(mixed.parts) == ["a", "c"] and all(part.seq_length == 7 for part in mixed.parts.values())
    assert not any(part.sources for part in mixed.parts.values())
    alone = load().data
    assert dict(alone.parts) == {"": alone}


# -- what a rank keeps in its GPU's memory, by size -------------------------------------------------------------------


GB = 10**9
KEEPS_ALL, KEEPS_PARAMETERS, KEEPS_NOTHING = Placement(False, False), Placement(False, True), Placement(True, True)


@pytest.mark.parametrize(
    ("params", "ranks", "gpu_bytes", "expected"),
    [
        (0.2e9, 1, 16 * GB, KEEPS_ALL),
        (1.1e9, 1, 24 * GB, KEEPS_NOTHING),
        (1.1e9, 1, 80 * GB, KEEPS_ALL),
        (10.2e9, 8, 80 * GB, KEEPS_PARAMETERS),
        (10.2e9, 8, 40 * GB, KEEPS_NOTHING),
        (10.2e9, 8, None, Placement(True, False)),
        (14e6, 2, None, KEEPS_ALL),
    ],
)
def test_what_is_left_open_is_kept_where_it_fits(
    params: float, ranks: int, gpu_bytes: int | None, expected: Placement
) -> None:
    assert placement(TrainConfig(), params=int(params), ranks=ranks, gpu_bytes=gpu_bytes) == expected


@pytest.mark.parametrize("gpu_bytes", [None, GB, 1000 * GB])
def test_what_the_configuration_says_is_done(gpu_bytes: int | None) -> None:
    train = TrainConfig(reshard_after_forward=False, reduce_gradients="micro_batch")
    assert placement(train, params=10**9, ranks=2, gpu_bytes=gpu_bytes) == KEEPS_PARAMETERS


@pytest.mark.parametrize("reduces", [None, "step"])
def test_a_step_is_never_added_up_in_bfloat16(reduces: str | None) -> None:
    with pytest.raises(ValidationError, match=r'set train.reduce_gradients = "micro_batch"'):
        TrainConfig(reduce_dtype="bfloat16", reduce_gradients=reduces)
