"""How much a run needs, and what a container allows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zeroband.checks import memory
from zeroband.checks.finding import Finding, require_start
from zeroband.checks.memory import gpu_memory, host_memory
from zeroband.checks.needs import Needs
from zeroband.config import load_config
from zeroband.errors import MachineUnfit

TINY = ("--model.d-model=32", "--model.n-layers=1", "--model.n-heads=2", "--model.d-ff=64", "--train.total-steps=100")
STORE = ("--store.url", "redis://127.0.0.1:1")
DILOCO = (*STORE, "--outer.type", "diloco", "--outer.inner-steps", "10")
FED_ADAM = str(Path(__file__).resolve().parents[3] / "examples" / "fed_adam.py")
EAGER = ("--outer.overlap", "full", "--outer.merge", "eager", "--outer.optimizer.lr", "0.4")


def needs_of(*arguments: str, sections: int = 3) -> Needs:
    return Needs(load_config([*TINY, *arguments], environ={}), vocab_size=320, sections=sections)


@pytest.mark.parametrize(
    ("arguments", "bytes_each", "with_checkpoints"),
    [
        ((), 0, 12),
        (DILOCO, 16, 32),
        ((*DILOCO, "--comm.codec", "int4"), 20, 36),
        ((*DILOCO, *EAGER), 24, 40),
        ((*STORE, "--outer.type", "ddp"), 20, 32),
        ((*STORE, "--outer.type", "demo"), 12, 20),
        ((*STORE, "--outer.type", "sparseloco", "--outer.inner-steps", "10"), 16, 32),
        ((*STORE, "--outer.type", "custom", "--outer.algorithm", FED_ADAM, "--outer.inner-steps", "10"), 20, 40),
    ],
)
def test_shared_memory_is_what_the_algorithm_and_checkpoints_hold(
    arguments: tuple[str, ...], bytes_each: int, with_checkpoints: int
) -> None:
    alone, kept = needs_of(*arguments), needs_of(*arguments, "--ckpt.path=somewhere")
    assert alone.shared_bytes == bytes_each * alone.params
    assert kept.shared_bytes == with_checkpoints * kept.params


def test_needs_without_the_tokenizer_are_the_least_that_they_can_be() -> None:
    config = load_config([*TINY, *DILOCO], environ={})
    assert 0 < Needs(config).shared_bytes < Needs(config, vocab_size=320).shared_bytes


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (DILOCO, 4),  # ten rounds: the newest three, and a fourth while it is written
        ((*DILOCO, "--ckpt.every-rounds=5"), 2),
        ((), 1),  # at its end alone
    ],
)
def test_no_more_checkpoints_are_expected_than_the_run_takes(arguments: tuple[str, ...], kept: int) -> None:
    assert needs_of(*arguments, "--ckpt.path=somewhere").kept_checkpoints == kept


@pytest.mark.parametrize(
    ("most", "used", "cached", "stops"),
    [
        (10**9, 10**6, 0, None),
        (10**6, 10**6, 10**6, None),
        (10**6, 10**6, 0, "finish"),
        (10**5, 0, 0, "start"),
    ],
)
def test_memory_of_a_container_is_its_limit(
    most: int, used: int, cached: int, stops: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.current").write_text(f"{used}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {cached}\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    needs = needs_of()
    assert needs.training_bytes == 16 * needs.params and 10**5 < needs.training_bytes < 10**6
    assert host_memory(needs, {}).stops == stops


@pytest.mark.parametrize(
    ("free", "total", "ranks", "stops"),
    [
        (10**6, 10**6, 1, [None]),
        (10**6, 10**6, 2, [None, None]),
        (300_000, 10**6, 1, ["finish"]),
        (300_000, 400_000, 1, ["start"]),
        (300_000, 400_000, 2, [None, None]),  # each holds half
        (300_000, 400_000, 4, [None, None]),  # two ranks on each, a quarter each
    ],
)
def test_gpu_holds_the_share_of_its_ranks(
    free: int, total: int, ranks: int, stops: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free, total))
    assert 400_000 < needs_of().training_bytes < 600_000
    assert [finding.stops for finding in gpu_memory(needs_of(), ranks)] == stops


def test_gpus_are_not_looked_at_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert list(gpu_memory(needs_of(), 2)) == []


def test_run_is_refused_by_what_it_cannot_start_with_and_told_of_the_rest() -> None:
    well, later = Finding("a", "fine", "could be better"), Finding("b", "short", "make room", stops="finish")
    assert require_start([well, later]) == [later]
    with pytest.raises(MachineUnfit, match=r"^c: absent; bring it\nd: broken$"):
        require_start(
            [well, Finding("c", "absent", "bring it", stops="start"), later, Finding("d", "broken", stops="start")]
        )
