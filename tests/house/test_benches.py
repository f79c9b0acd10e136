"""Measurements that would measure nothing, or miss their aim, end with another code than 0, and say so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """bench(name, *arguments): a measurement as its command line starts it."""
    monkeypatch.syspath_prepend(str(BENCH))

    def load(name: str, *arguments: str) -> ModuleType:
        monkeypatch.setattr(sys, "argv", [f"bench/{name}.py", *arguments])
        return importlib.import_module(name)

    return load


def ending(main: Callable[[], object]) -> object:
    """What a measurement ends with; 0 where it ends as if it had measured something."""
    try:
        main()
    except SystemExit as end:
        return end.code
    return 0


NOTHING = [
    ("kernels", ["kernel"], "'kernel' measures nothing; there are kernels, dct, round"),
    ("strangers", ["nose"], "'nose' measures nothing; there are noise, abort"),
    ("all_reduce", ["codec"], "'codec' measures nothing; there are codecs, loopback"),
    ("checkpoint", ["--repeats", "0"], "0 measures nothing; give 1 or more"),
    ("recovery", ["--repeats", "0"], "0 measures nothing; give 1 or more"),
    ("large_join", ["--params", "1"], "--params 1 are too few"),
    ("join_cost", ["--rounds", "0"], "0 measures nothing; give 1 or more"),
    ("sparse", ["--runs", "0"], "0 measures nothing; give 1 or more"),
    ("train_loop", ["--steps", "0"], "0 measures nothing; give 1 or more"),
    ("sft", ["--steps", "0"], "0 measures nothing; give 1 or more"),
    ("others", ["--repeats", "0"], "0 measures nothing; give 1 or more"),
    ("outer_step", ["--turns", "0"], "0 measures nothing; give 1 or more"),
    ("prepare", ["--repeats", "0"], "0 measures nothing; give 1 or more"),
    ("board", ["--seconds", "0"], "0 measures nothing; give 1 or more"),
    ("facts", ["--seconds", "0"], "0 measures nothing; give 1 or more"),
    ("stream", ["disks"], "'disks' measures nothing; there are local, links"),
]


@pytest.mark.parametrize(("name", "arguments", "said"), NOTHING)
def test_measurement_of_nothing_is_refused(
    bench: Callable[..., ModuleType], capsys: pytest.CaptureFixture[str], name: str, arguments: list[str], said: str
) -> None:
    assert ending(bench(name, *arguments).main) == 2
    assert said in capsys.readouterr().err


def test_one_of_several_that_is_unknown_is_refused_before_the_others_run(
    bench: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    elastic = bench("elastic")
    monkeypatch.setitem(elastic.MEASUREMENTS, "slow", lambda: pytest.fail("it was measured"))
    assert ending(lambda: elastic.main(["slow", "slowest"])) == 2
    assert "'slowest' measures nothing" in capsys.readouterr().err


def test_run_in_which_nothing_happened_is_no_measurement_of_churn(
    bench: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    churn = bench("churn")
    run = churn.Run(curve=[(100, 2.0), (200, 1.0)], trained=200, wall_s=1.0)
    monkeypatch.setattr(churn, "train", lambda *_: run)
    assert "nothing happened in a run of late" in str(ending(churn.main))


def test_comparison_with_packages_that_are_not_there_is_none(
    bench: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    others = bench("others")
    lacks: dict[str, Any] = dict.fromkeys(others.WAYS, "No module named 'hivemind'") | {"gloo/1": None}
    monkeypatch.setattr(others, "why_not", lacks.__getitem__)
    monkeypatch.setattr(others, "measure", lambda *_, **__: pytest.fail("it was measured"))
    assert "no way of another package" in str(ending(others.main))


def test_figure_that_is_none_is_no_measurement(bench: Callable[..., ModuleType]) -> None:
    evidence = bench("evidence")
    assert evidence.finite(1.5, "it") == 1.5
    with pytest.raises(SystemExit, match="nothing was measured: the loss is nan"):
        evidence.finite(float("nan"), "the loss")


@pytest.mark.parametrize(
    ("ours_s", "predicted_bytes", "died", "missed"),
    [
        (1.03, 91, "", []),
        (1.04, 91, "", ["tokens/s beside the faster loop by hand"]),
        (1.12, 91, "", ["tokens/s beside the faster loop by hand", "MFU"]),
        (1.0, 111, "", ["1 - error of the memory"]),
        (1.0, 100, "exit code 1: no such kernel", []),
    ],
)
def test_loop_that_dies_or_misses_an_aim_is_told_in_the_table_and_by_the_exit_code(
    bench: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ours_s: float, predicted_bytes: int, died: str, missed: list[str],
) -> None:  # fmt: skip
    """The three aims that scripts/gpu_check.sh holds a GPU to, at figures on both sides of each."""
    aims = ("--least-ratio", "0.97", "--least-mfu", "0.45", "--memory-within", "0.1")
    loops = bench("train_loop", "--steps", "1", *aims)
    tokens = loops.DEFAULTS["train.batch_size"] * loops.DEFAULTS["data.seq_length"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=1 << 36))
    monkeypatch.setattr(loops, "flops_per_token", lambda *_: 1.0)
    monkeypatch.setattr(loops, "peak_flops", lambda *_: 2 * tokens)
    monkeypatch.setattr(loops, "predict_gpu", lambda *_: SimpleNamespace(tensors={"all": predicted_bytes}))

    def ran(name: str, took_s: float) -> list[Any]:
        return [loops.Measured(name, [loops.Turn(took_s, 2.0, 100)])]

    found = [ran(loops.BARE, 1.0), [loops.Measured("float8", [], died)] if died else [], ran(loops.OURS, ours_s)]
    monkeypatch.setattr(loops, "measure", lambda *_: iter([*found, ran("no compile", 2.0)]))
    assert ending(loops.main) == int(bool(missed or died))
    shown = capsys.readouterr().out
    assert [line.split(":")[0] for line in shown.splitlines() if "MISSED" in line] == [
        f"Aim, {name}" for name in missed
    ]
    assert f"| float8 | failed: {died} |" in shown if died else "failed" not in shown
    assert "| no compile | " in shown, "those behind one that died are measured"


def test_kernel_that_dies_or_is_slow_is_told_and_the_next_one_is_measured(
    bench: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernels = bench("kernels")
    monkeypatch.setattr(kernels, "DEVICE", torch.device("cpu"))

    def work(name: str, took_s: float) -> Any:
        return SimpleNamespace(name=name, moved_bytes=100e9, seconds=lambda: took_s)

    def died() -> Any:
        raise RuntimeError("no image for\nthis card")

    monkeypatch.setattr(kernels, "copies", lambda _: work("copy", 1.0))
    fast, slow = (("step", "Triton", lambda s=s: work("step, Triton", s)) for s in (1.17, 1.19))
    plain = ("step", "plain torch", lambda: work("step, plain torch", 9.0))
    assert [kernels.compare([one, plain], 1, 0.85) for one in (fast, slow)] == [False, True]
    capsys.readouterr()
    assert kernels.compare([("encode", "Triton", died), fast], 1, None)
    shown = capsys.readouterr().out
    assert "| encode, Triton | failed: RuntimeError: no image for this card |" in shown
    assert "| step, Triton | 85 | 85 | 0.85 | 0.85 |" in shown
