"""What a run is predicted to take on its GPUs, against torch's own tracker, whole models and sums by hand."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeroband.checks import gpu_prediction, rehearsal
from zeroband.checks.gpu_prediction import CONTEXT_BYTES, MARGIN, NCCL_BYTES, GpuRun, knobs, predict_gpu, way_out
from zeroband.checks.needs import Needs
from zeroband.checks.rehearsal import EDGE, rehearse
from zeroband.config import load_config
from zeroband.config.training import Placement
from zeroband.model.optim import InnerOptimizer

GB = 10**9
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
SMALL = (
    *("--model.d-model=64", "--model.n-heads=4", "--model.n-kv-heads=2", "--model.d-ff=128"),
    *("--data.seq-length=128", "--train.batch-size=8", "--train.micro-bs=2"),
)
STORE = {"ZERO_BAND_STORE__URL": "redis://localhost"}


def small(*arguments: str, ranks: int = 2, gpu_bytes: int = GB) -> GpuRun:
    return GpuRun(Needs(load_config([*SMALL, *arguments], environ={}), 512), ranks, gpu_bytes)


def preset(name: str, *arguments: str, ranks: int, gpu_bytes: int, vocab_size: int) -> GpuRun:
    config = load_config([f"@{CONFIGS / name}.toml", *arguments], environ=STORE)
    return GpuRun(Needs(config, vocab_size), ranks, gpu_bytes)


def ten_billion(*arguments: str) -> GpuRun:
    return preset("10B", *arguments, ranks=8, gpu_bytes=80 * GB, vocab_size=128_256)


@pytest.mark.slow
def test_10b_takes_at_most_64_gb_of_each_of_eight_gpus() -> None:
    assert 50 * GB < predict_gpu(ten_billion()).peak_bytes <= 64 * GB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "asked", "gpu_bytes", "setting"),
    [
        pytest.param(
            *("1B", ("--train.micro-bs=4",), 24 * GB, "--train.activation_checkpointing full"), marks=pytest.mark.soak
        ),
        pytest.param("150M", (), 16 * GB, "--train.micro_bs 16", marks=pytest.mark.soak),
    ],
)
def test_smaller_presets_fit_one_small_card_with_the_setting_that_is_named(
    name: str, asked: tuple[str, ...], gpu_bytes: int, setting: str
) -> None:
    run = preset(name, *asked, ranks=1, gpu_bytes=gpu_bytes, vocab_size=32_000)
    said = way_out(run, gpu_bytes)
    assert predict_gpu(run).peak_bytes > gpu_bytes and said.startswith(f"set {setting} needs ")
    turned = preset(name, *asked, *setting.split(), ranks=1, gpu_bytes=gpu_bytes, vocab_size=32_000)
    assert predict_gpu(turned).peak_bytes <= gpu_bytes


@pytest.mark.soak  # of 1B all rows of docs/gpu.md are compared by hand, too
def test_1b_fits_one_large_card_as_it_is() -> None:
    assert predict_gpu(preset("1B", ranks=1, gpu_bytes=80 * GB, vocab_size=32_000)).peak_bytes < 64 * GB


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpointing", "placed"),
    [
        pytest.param("none", Placement(False, False), marks=pytest.mark.soak),
        ("selective", Placement(True, True)),
        pytest.param("full", Placement(True, False), marks=pytest.mark.soak),
    ],
)
def test_each_further_block_adds_the_same_to_each_moment_and_so_it_is_predicted(
    checkpointing: str, placed: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_prediction, "placement", lambda *_, **__: placed)
    runs = [
        small(f"--model.n-layers={blocks}", f"--train.activation-checkpointing={checkpointing}")
        for blocks in (2 * EDGE, 2 * EDGE + 1, 2 * EDGE + 3)
    ]
    fewer, more, whole = (gpu_prediction.rehearse(run.config, 512, ranks=2, placed=placed) for run in runs)
    totals = [{moment: sum(of.values()) for moment, of in found.items()} for found in (fewer, more, whole)]
    for moment, total in totals[0].items():
        assert totals[2][moment] == total + 3 * (totals[1][moment] - total), moment
    between = [total for moment, total in totals[2].items() if moment not in fewer]
    assert between and max(between) <= max(totals[2][moment] for moment in fewer)
    assert sum(predict_gpu(runs[2]).tensors.values()) == max(totals[2].values())


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", pytest.param("selective", marks=pytest.mark.soak), "full"])
def test_peak_is_that_of_torchs_own_tracker(checkpointing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker  # loads Dynamo

    trackers: list[FSDPMemTracker] = []
    stack = ExitStack()

    class Stepping(InnerOptimizer):
        def step(self) -> None:
            super().step()
            stack.close()

    allocate, begin = rehearsal.allocate, rehearsal.begin_micro_batch

    def make_room_and_track(model: Any, local: Any) -> None:
        allocate(model, local)
        trackers.append(stack.enter_context(FSDPMemTracker(model)))

    def begin_pass(model: Any, placed: Placement, *, is_last: bool) -> None:
        trackers[0].reset_mod_stats()
        begin(model, placed, is_last=is_last)

    monkeypatch.setattr(rehearsal, "allocate", make_room_and_track)
    monkeypatch.setattr(rehearsal, "begin_micro_batch", begin_pass)
    monkeypatch.setattr(rehearsal, "InnerOptimizer", Stepping)
    run = small("--model.n-layers=2", f"--train.activation-checkpointing={checkpointing}")
    ours = rehearse(run.config, run.needs.vocab_size, ranks=2, placed=Placement(True, False))
    theirs = trackers[0].get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert max(sum(of.values()) for of in ours.values()) == pytest.approx(theirs, rel=0.005)


@pytest.mark.slow
def test_one_rank_in_float32_holds_each_value_four_times_between_steps() -> None:
    run = small("--model.n-layers=2", "--train.dtype=float32", "--train.batch-size=2", ranks=1)
    of = rehearse(run.config, run.needs.vocab_size, ranks=1, placed=Placement(False, False))["step",]
    each = 4 * run.needs.params
    assert (of["parameters"], of["gradients"]) == (each, each)
    assert of["optimizer"] == pytest.approx(2 * each, rel=0.001)
    assert of["gathered"] == of["loss"] == 0 and of["activations"] < each / 100


@pytest.mark.slow
def test_ranks_share_what_lies_between_steps_and_outer_state_comes_to_it() -> None:
    two = predict_gpu(small("--model.n-layers=2"))
    outer = ("--outer.type=diloco", "--store.url=redis://localhost", "--outer.state-device=cuda")
    one = predict_gpu(small("--model.n-layers=2", *outer, ranks=1))
    assert two.tensors["parameters"] == pytest.approx(one.tensors["parameters"] / 2, rel=0.01)
    assert (two.outer_state, one.outer_state) == (0, 8 * small("--model.n-layers=2").needs.params)
    assert (two.parts["context"], one.parts["context"]) == (CONTEXT_BYTES + NCCL_BYTES, CONTEXT_BYTES)
    held = sum(one.tensors.values()) + one.outer_state
    assert one.peak_bytes == held + int(MARGIN * held) + CONTEXT_BYTES


@pytest.mark.slow
def test_int8_moments_save_six_bytes_a_parameter() -> None:
    run, low = small("--model.n-layers=1"), small("--model.n-layers=1", "--optim.state-dtype=int8")
    saved = predict_gpu(run).tensors["optimizer"] - predict_gpu(low).tensors["optimizer"]
    assert saved == pytest.approx((8 - 2 * (1 + 4 / 256)) * run.needs.params / 2, rel=1e-5)


FULL, RESHARD, INT8 = (
    "--train.activation_checkpointing full",
    "--train.reshard_after_forward true",
    "--optim.state_dtype int8",
)


@pytest.mark.parametrize(
    ("room", "outer", "combined"),
    [
        (9, "diloco", []),
        (5, "diloco", [f"{FULL} {RESHARD}"]),
        (3, "diloco", [f"{FULL} {RESHARD}", f"{FULL} {RESHARD} {INT8}"]),
        (3, "ddp", [f"{FULL} {RESHARD}"]),
    ],
)
def test_int8_moments_are_combined_only_where_exact_settings_do_not_suffice(
    room: int, outer: str, combined: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made up: 10 bytes, of which full checkpointing saves 4, resharding 1, moments in bfloat16 1 and in int8 2."""

    def predicted(run: GpuRun) -> Any:
        train, saved = run.config.train, {"bfloat16": 1, "int8": 2}.get(run.config.optim.state_dtype, 0)
        is_full, reshards = train.activation_checkpointing == "full", train.reshard_after_forward is True
        return SimpleNamespace(peak_bytes=10 - 4 * is_full - reshards - saved)

    monkeypatch.setattr(gpu_prediction, "predict_gpu", predicted)
    settings = ("--train.micro-bs=1", "--train.reduce-gradients=micro_batch")
    checkpointing = "--train.activation-checkpointing=selective"
    run = small(*settings, checkpointing, f"--outer.type={outer}", "--store.url=redis://localhost", gpu_bytes=10 * GB)
    low = INT8.replace("int8", "bfloat16") if room == 9 else INT8
    single = [FULL, RESHARD, *([low] if outer == "diloco" else [])]
    assert [str(knob) for knob in knobs(run, room)] == [*single, *combined]


@pytest.mark.slow
def test_each_knob_saves_and_all_of_them_are_tried_where_one_is_not_enough() -> None:
    outer = ("--outer.type=diloco", "--store.url=redis://localhost", "--outer.state-device=cuda")
    run = small("--model.n-layers=1", *outer, gpu_bytes=GB)
    peak, found = predict_gpu(run).peak_bytes, list(knobs(run, 0))
    assert [str(knob) for knob in found[:-2]] == [
        "--train.micro_bs 1",
        "--train.activation_checkpointing selective",
        "--train.activation_checkpointing full",
        "--train.reshard_after_forward true",
        "--train.reduce_gradients micro_batch",
        "--outer.state_device cpu",
        "--optim.state_dtype int8",
    ]
    assert max(knob.peak_bytes for knob in found[:3]) < peak and found[5].peak_bytes < peak
    assert str(found[-1]) == f"{found[-2]} --optim.state_dtype int8"
    assert found[-1].peak_bytes == min(knob.peak_bytes for knob in found)
    assert way_out(run, 0).startswith(f"even {found[-1]} needs ")
    assert not torch.distributed.is_initialized()
