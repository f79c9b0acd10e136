"""The curve of docs/results.md is made of results/: its tables as they stand there, and those of made-up runs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest
from tests.unit.tools.compare.outcomes import outcome

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def script(root: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("draw_results", root / "scripts" / "draw_results.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["draw_results"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["draw_results"]


def test_page_and_figure_are_made_of_the_results(script: ModuleType, root: Path) -> None:
    curves = [script.read_curve(files) for files in script.CURVES]
    page = (root / "docs" / "results.md").read_text()
    assert script.with_curves(page, curves) == page, "run scripts/draw_results.py"
    if f"\nmatplotlib=={version('matplotlib')} " not in (root / "requirements.lock").read_text():
        pytest.skip("another matplotlib draws another file")
    drawn = script.drawn(partial(script.draw_curves, curves=curves))
    assert drawn == (root / "docs" / "results-curve.svg").read_text(), "run scripts/draw_results.py"


def test_every_result_is_read_into_a_curve(script: ModuleType, root: Path) -> None:
    """None is left out because of its name, its place or its method."""
    curves = [script.read_curve(files) for files in script.CURVES]
    methods = {arm.name for curve in curves for arm in curve.options.methods}
    outcomes = [one for curve in curves for one in curve.outcomes]
    assert len(outcomes) == len(list((root / "results").rglob("*.json")))
    assert all(one.arm in methods and one.made_by.commit and "dirty" not in one.made_by.commit for one in outcomes)


def test_curve_shows_intervals_brackets_and_answers(script: ModuleType) -> None:
    options = script.read_curve(("curve",)).options
    runs = [outcome("ddp", lr, 2.0 + 0.1 * (lr != 8e-3) + 0.01 * seed, seed=seed) for seed, lr in ONE_BRACKET]
    for nodes in script.NODES:
        for rate in (0.4, 0.6, 0.8):
            arm = f"diloco-fp32:nodes={nodes}:optimizer.lr={rate:g}"
            rates = ONE_BRACKET if rate == 0.6 else [(0, 8e-3)]
            runs += [
                outcome(arm, lr, 2.0 + 0.02 * nodes + 0.1 * (lr != 8e-3) + abs(rate - 0.6) + 0.01 * seed, seed=seed)
                for seed, lr in rates
            ]
    runs = [replace(run, params=127_296) for run in runs]
    curve = script.curve_of(options, runs)
    told = script.curves_in_words([curve])
    assert "| 127k, 100 steps | DiLoCo, M = 8 | 0.008, 0.6 | 5 | 2.1800 | +0.1600 (+0.1600 to +0.1600) | " in told
    assert "met: 0.04" in told and "(edge)" not in told
    assert "0.4: 0.008 2.3600; 0.6: 0.004 2.2600, 0.008 **2.1600**, 0.016 2.2600; 0.8: 0.008 2.3600" in told
    assert "extrapolated law" in script.drawn(partial(script.draw_curves, curves=[curve]))


ONE_BRACKET = [(0, 4e-3), (0, 8e-3), (0, 1.6e-2), *((seed, 8e-3) for seed in range(1, 5))]
"""Seed and inner rate of the runs of a method."""
