"""How much a run needs, and what a container allows."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from zeroband.checks import gpu_prediction, memory
from zeroband.checks.finding import Finding, require_start
from zeroband.checks.memory import gpu_memory, host_memory, out_of_gpu_memory, shared_memory
from zeroband.checks.needs import CPU_PROCESS_BYTES, NCCL_BYTES, Needs
from zeroband.config import load_config
from zeroband.errors import MachineUnfit
from zeroband.kernels.formats import FORMATS
from zeroband.model import Transformer
from zeroband.model.muon import muon_parameters

TINY = ("--model.d-model=32", "--model.n-layers=1", "--model.n-heads=2", "--model.d-ff=64", "--train.total-steps=100")
STORE = ("--store.url", "redis://127.0.0.1:1")
DILOCO = (*STORE, "--outer.type", "diloco", "--outer.inner-steps", "10")
FED_ADAM = str(Path(__file__).resolve().parents[3] / "examples" / "fed_adam.py")
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
EAGER = ("--outer.overlap", "full", "--outer.merge", "eager", "--outer.optimizer.lr", "0.4")


def needs_of(*arguments: str, sections: int = 3) -> Needs:
    return Needs(load_config([*TINY, *arguments], environ={}), vocab_size=320, sections=sections)


@pytest.mark.parametrize(
    ("arguments", "bytes_each", "with_checkpoints", "mean"),
    [
        ((), 0, 12, None),
        (DILOCO, 16, 32, "int8"),
        ((*DILOCO, "--comm.codec", "int4"), 20, 36, "int4"),
        ((*DILOCO, "--comm.codec", "fp32"), 16, 32, None),
        ((*DILOCO, *EAGER), 24, 40, "int8"),
        ((*STORE, "--outer.type", "ddp"), 20, 32, None),
        ((*STORE, "--outer.type", "demo"), 12, 20, None),
        ((*STORE, "--outer.type", "sparseloco", "--outer.inner-steps", "10"), 16, 32, None),
        ((*STORE, "--outer.type", "custom", "--outer.algorithm", FED_ADAM, "--outer.inner-steps", "10"), 20, 40, None),
    ],
)
def test_shared_memory_is_what_the_algorithm_and_checkpoints_hold(
    arguments: tuple[str, ...], bytes_each: int, with_checkpoints: int, mean: str | None
) -> None:
    """`mean`: how it lies there as it travelled, for the journal."""
    alone, kept = needs_of(*arguments), needs_of(*arguments, "--ckpt.path=somewhere")
    encoded_bytes = 0 if mean is None else FORMATS[mean].encoded_size(alone.params)
    assert alone.shared_bytes == bytes_each * alone.params + encoded_bytes
    assert kept.shared_bytes == with_checkpoints * kept.params + encoded_bytes


def test_outer_state_on_a_gpu_needs_room_for_its_contribution_too() -> None:
    plain, on_gpu = needs_of(*DILOCO), needs_of(*DILOCO, "--outer.state-device", "cuda")
    assert on_gpu.shared_bytes - plain.shared_bytes == FORMATS["int8"].encoded_size(plain.params)


@pytest.mark.parametrize(("preset", "vocab_size"), [("10B", 128_256), ("1B", 32_000)])
def test_presets_name_the_shared_memory_of_a_node_without_checkpoints_and_with_them(
    preset: str, vocab_size: int
) -> None:
    text = (CONFIGS / f"{preset}.toml").read_text(encoding="utf-8").partition("# Links:")[0]
    for arguments in ((), ("--ckpt.path", "somewhere")):
        needs = Needs(load_config([f"@{preset}", *STORE, *arguments], environ={}), vocab_size)
        assert f" {math.ceil(needs.shared_bytes / 1e9)} GB" in text


def test_shared_memory_leaves_its_part_to_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Filled to the byte, NCCL's first exchange of two GPUs without a direct link fails, or dies of a bus error."""
    needs = needs_of(*DILOCO, "--node.shm-dir", str(tmp_path))
    monkeypatch.setattr(memory, "has_gpu", lambda environ: "GPU" in environ)
    monkeypatch.setattr(memory, "_NCCL_FOLDER", tmp_path)
    several, free = {"LOCAL_WORLD_SIZE": "2", "GPU": ""}, needs.shared_bytes + NCCL_BYTES - 1

    def finding(environ: dict[str, str]) -> Finding:
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
        return shared_memory(needs, environ)

    assert finding(several).stops == "start" and "and NCCL 1.07 GB" in finding(several).seen
    assert not any(finding(environ).stops for environ in ({"GPU": ""}, {"LOCAL_WORLD_SIZE": "2"}))
    free += 1
    assert not finding(several).stops


@pytest.mark.parametrize(
    ("seen", "environ", "ranks"),
    [
        (8, {}, 1),
        (4, {}, 2),
        (1, {}, 8),
        (1, {"CUDA_VISIBLE_DEVICES": "3"}, 1),
        (2, {"CUDA_VISIBLE_DEVICES": "0,1"}, 4),
    ],
)
def test_eight_ranks_that_see_one_gpu_each_do_not_share_it(seen: int, environ: dict[str, str], ranks: int) -> None:
    assert memory.ranks_on_gpu(8, seen, environ) == ranks


def test_host_memory_has_the_donors_copy_and_each_rank_its_process() -> None:
    alone, joined = needs_of().host_parts(2), needs_of(*DILOCO).host_parts(4)
    assert (alone["donor's copy"], joined["donor's copy"]) == (0, 8 * needs_of().params)
    assert joined["processes"] == 2 * alone["processes"]
    assert joined["pinned copies"] == 2 * 4 * needs_of().vocab_size * needs_of().config.model.d_model


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


def test_matrices_that_muon_steps_have_one_moment() -> None:
    with_muon, without = needs_of("--optim.muon={}"), needs_of()
    model = Transformer(without.config.model, without.vocab_size)
    matrices = sum(parameter.numel() for parameter in muon_parameters(model).values())
    assert with_muon.training_bytes == without.training_bytes - 4 * matrices < without.training_bytes
    assert with_muon.checkpoint_bytes == without.checkpoint_bytes


@pytest.mark.parametrize(
    ("most", "used", "cached", "stops"),
    [
        (10**9, 10**6, 0, None),
        (CPU_PROCESS_BYTES + 10**6, 10**6, 10**6, None),
        (CPU_PROCESS_BYTES + 10**6, 10**6, 0, "finish"),
        (CPU_PROCESS_BYTES + 10**5, 0, 0, "start"),
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


class Card:
    """Two GPUs of so many bytes, as torch shows them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, free: float, total: float) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: (int(free), int(total)))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 79_000_000_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("free", "total", "ranks", "stops"),
    [
        (2e9, 2e9, 1, [None]),
        (2e9, 2e9, 2, [None, None]),
        (0.5e9, 2e9, 1, ["finish"]),
        (2e9, 2e9, 4, ["start", "start"]),  # two on each
        (4e9, 4e9, 4, [None, None]),
        (0.6e9, 0.6e9, 1, ["start"]),
    ],
)
def test_gpu_needs_room_for_what_its_ranks_are_predicted_to_take(
    free: float, total: float, ranks: int, stops: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    Card(monkeypatch, free=free, total=total)
    monkeypatch.setattr(gpu_prediction, "way_out", lambda run, room: "which takes a rehearsal of each setting")
    needs = needs_of("--train.batch-size=4")
    assert [finding.stops for finding in gpu_memory(needs, ranks)] == stops


@pytest.mark.slow
def test_run_that_no_gpu_holds_is_refused_with_the_setting_that_makes_it_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=2e9, total=2e9)
    needs = needs_of("--train.batch-size=512", "--train.micro-bs=512", "--data.seq-length=2048")
    with pytest.raises(MachineUnfit, match=r"this run is predicted to take .* GB; set --train\.micro_bs \d+ needs"):
        require_start(gpu_memory(needs, 1))


@pytest.mark.slow
def test_rank_looks_at_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=2e9, total=2e9)
    assert [finding.what for finding in gpu_memory(needs_of("--train.batch-size=4"), 2, rank=1)] == ["GPU 1"]


def test_torch_whose_fake_tensors_fail_keeps_no_run_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no fake kernel")

    Card(monkeypatch, free=2e9, total=2e9)
    monkeypatch.setattr(gpu_prediction, "predict_gpu", fail)
    (found,) = gpu_memory(needs_of(), 1)
    assert not found.is_fatal and "cannot predict what this run takes: RuntimeError('no fake kernel')" in found.seen


@pytest.mark.slow
def test_memory_that_ran_out_names_both_peaks_and_what_takes_less(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch, free=0, total=80e9)
    needs = needs_of("--train.batch-size=512", "--train.micro-bs=512", "--data.seq-length=2048")
    said = out_of_gpu_memory(torch.OutOfMemoryError("CUDA out of memory"), needs, 1)
    assert said is not None and re.search(
        r"NVIDIA H100, of which a rank has 80 GB: its tensors took 79 GB at the peak, [\d.]+ GB were predicted in all; "
        r"set --train\.micro_bs 256 needs",
        str(said),
    )
    assert out_of_gpu_memory(RuntimeError("CUDA error"), needs, 1) is None


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
