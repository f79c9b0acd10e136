"""Measurements that would measure nothing end with another code than 0, and say so."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

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


def test_run_that_nobody_left_is_no_measurement_of_churn(
    bench: Callable[..., ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    churn = bench("churn")
    run = churn.Run(curve=[(100, 2.0), (200, 1.0)], trained=200, wall_s=1.0, departures=0)
    monkeypatch.setattr(churn, "train", lambda *_: run)
    assert "no node left" in str(ending(churn.main))


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
