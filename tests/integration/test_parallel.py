"""FSDP2 on two real processes against one: sharding must not change what is learned."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.integration.ranks import run_ranks

FLOAT32 = ("plain", "micro_batches", "recompute", "kept_gathered", "tied")

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Run:
    folder: Path

    def seen(self, rank: int = 0) -> dict[str, Any]:
        return json.loads((self.folder / f"rank{rank}.json").read_text())

    def tensors(self, scenario: str, kind: str) -> dict[str, torch.Tensor]:
        values = load_file(self.folder / f"{scenario}.safetensors")
        return {name.removeprefix(f"{kind}/"): value for name, value in values.items() if name.startswith(f"{kind}/")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """On one rank and on two."""
    folders = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    run_ranks("parallel_worker", (folders[0], 1), (folders[1], 2))
    return Run(folders[0]), Run(folders[1])


@pytest.fixture(scope="module")
def one(runs: tuple[Run, Run]) -> Run:
    return runs[0]


@pytest.fixture(scope="module")
def two(runs: tuple[Run, Run]) -> Run:
    return runs[1]


@pytest.mark.parametrize("scenario", ["tied", "kept_gathered"])
def test_weights_leave_two_ranks_for_a_directory_and_come_back_bit_for_bit(two: Run, scenario: str) -> None:
    final = two.tensors(scenario, "final")
    assert len(final) >= 20
    for kind in ("export", "import"):
        held = two.tensors(scenario, kind)
        assert held.keys() == final.keys()
        assert all(torch.equal(value, final[name]) for name, value in held.items())


@pytest.mark.parametrize("scenario", FLOAT32)
def test_two_ranks_learn_what_one_learns_within_float32_rounding(one: Run, two: Run, scenario: str) -> None:
    ours, reference = two.seen()[scenario], one.seen()[scenario]
    assert ours["norms"] == pytest.approx(reference["norms"], rel=1e-4)
    assert ours["held_out"] == pytest.approx(reference["held_out"], rel=1e-5)
    gradients = one.tensors(scenario, "gradient")
    for name, gradient in two.tensors(scenario, "gradient").items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-3, atol=1e-5)
    expected, initial = one.tensors(scenario, "final"), one.tensors(scenario, "initial")
    for name, value in two.tensors(scenario, "final").items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-4)
        assert (value - initial[name]).abs().max() > 1e-3, f"{name} did not move"


@pytest.mark.parametrize("scenario", ["micro_batches", "reduced_each_time", "recompute", "kept_gathered"])
def test_memory_switches_do_not_change_what_is_learned(two: Run, scenario: str) -> None:
    reference = two.tensors("plain", "final")
    for name, value in two.tensors(scenario, "final").items():
        torch.testing.assert_close(value, reference[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("scenario", ["plain", "tied"])
def test_initial_weights_do_not_depend_on_the_number_of_ranks(one: Run, two: Run, scenario: str) -> None:
    expected, got = one.tensors(scenario, "initial"), two.tensors(scenario, "initial")
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


def test_bfloat16_gradients_are_reduced_in_float32(two: Run) -> None:
    """Each rank's gradient is a bfloat16 value; a sum of two that were reduced in bfloat16 would be one as well."""
    values = torch.cat([gradient.flatten() for gradient in two.tensors("bfloat16", "gradient").values()])
    assert values.dtype == torch.float32
    assert (values != values.bfloat16().float()).float().mean() > 0.3


def test_gradients_summed_in_bfloat16_are_added_up_in_float32(two: Run) -> None:
    """With one micro-batch they would be bfloat16 values."""
    gradients, expected = two.tensors("reduced_in_bfloat16", "gradient"), two.tensors("plain", "gradient")
    values = torch.cat([gradient.flatten() for gradient in gradients.values()])
    assert (values != values.bfloat16().float()).float().mean() > 0.3
    for name, gradient in gradients.items():
        assert 0 < (gradient - expected[name]).norm() < 0.05 * expected[name].norm(), name


def test_bfloat16_stays_close_to_float32(one: Run, two: Run) -> None:
    for run in (one, two):
        assert run.seen()["bfloat16"]["held_out"] == pytest.approx(run.seen()["plain"]["held_out"], rel=0.01)


def test_ranks_agree_on_norms_samples_and_evaluation(two: Run) -> None:
    for scenario in (*FLOAT32, "bfloat16"):
        first, second = two.seen(0)[scenario], two.seen(1)[scenario]
        for key in ("norms", "sample", "held_out"):
            assert first[key] == second[key], (scenario, key)


def test_numbers_beside_the_norm_become_their_sums_over_the_ranks(one: Run, two: Run) -> None:
    seen = [run.seen(rank)["plain"]["beside"] for run, rank in ((one, 0), (two, 0), (two, 1))]
    assert seen == [[1.0, 0.0, 0.0], [3.0, 0.0, 0.0], [3.0, 0.0, 0.0]]
    _, *alone = one.seen()["by_source"]["beside"]
    _, *shared = two.seen()["by_source"]["beside"]
    assert shared == two.seen(1)["by_source"]["beside"][1:] == pytest.approx(alone, rel=1e-4)
    assert alone[0] != alone[1] and min(alone) > 0


def test_telling_sources_apart_changes_no_bit_on_one_rank_or_two(one: Run, two: Run) -> None:
    for run in (one, two):
        assert run.seen()["by_source"]["norms"] == run.seen()["micro_batches"]["norms"]
        expected = run.tensors("micro_batches", "final")
        assert all(torch.equal(value, expected[name]) for name, value in run.tensors("by_source", "final").items())


def test_each_rank_holds_its_rows_of_the_moments(two: Run) -> None:
    rows = [two.seen(rank)["plain"]["shard_rows"]["embed_tokens.weight"] for rank in (0, 1)]
    assert rows == [31, 30]


@pytest.mark.defect(5)
def test_decisions_come_from_rank_0_and_need_all(two: Run) -> None:
    for rank in (0, 1):
        assert two.seen(rank)["decisions"] == {
            "broadcast": {"from": 0, "text": "é" * 1000},
            "gathered": [{"from": 0}, {"from": 1}],
            "all_true": True,
            "last_false": False,
        }
