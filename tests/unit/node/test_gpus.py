from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.node.gpus import share_of, visible_gpus


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        ("0,1", ("0", "1")),
        (" 2 , GPU-5f1c ", ("2", "GPU-5f1c")),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
    ],
)
def test_visible_gpus_are_those_that_the_environment_names(named: str, gpus: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}) == gpus


def _driver(folder: Path, script: str) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)


def test_visible_gpus_are_those_that_the_driver_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _driver(tmp_path, 'printf "0\\n1\\n2\\n"')
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ("0", "1", "2")


@pytest.mark.parametrize("script", ["echo 'No devices were found'", "echo 0; exit 9"])
def test_visible_gpus_are_none_when_the_driver_finds_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    _driver(tmp_path, script)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ()


def test_visible_gpus_are_none_without_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ()


@pytest.mark.parametrize(
    ("gpus", "first_rank", "ranks", "share"),
    [
        ("0123", 0, 2, "01"),
        ("0123", 2, 2, "23"),
        ("012", 2, 2, "20"),
        ("0", 3, 2, "0"),
        ("01", 1, 1, "1"),
        ("", 0, 2, ""),
    ],
)
def test_share_of_goes_round_robin_over_the_ranks_of_all_nodes(
    gpus: str, first_rank: int, ranks: int, share: str
) -> None:
    assert share_of(tuple(gpus), first_rank=first_rank, ranks=ranks) == tuple(share)
