"""The table of peaks against names that drivers give, and this process's memory."""

from __future__ import annotations

import mmap

import pytest
import torch

from zeroband.observe.hardware import PEAK_BF16_TERAFLOPS, peak_flops, peak_flops_of, peak_flops_of_all, resident_bytes

TERAFLOPS = {
    "NVIDIA H100 80GB HBM3": 989.0,
    "NVIDIA H100 PCIe": 756.0,
    "NVIDIA H100 NVL": 835.0,
    "NVIDIA GB200": 2500.0,
    "NVIDIA A10": 125.0,
    "NVIDIA A10G": 70.0,
    "NVIDIA L4": 121.0,
    "NVIDIA L40S": 362.0,
    "NVIDIA RTX 6000 Ada Generation": 364.2,
    "NVIDIA GeForce RTX 4090 D": 147.1,
    "NVIDIA GeForce RTX 4070 Ti SUPER": 88.2,
    "NVIDIA GeForce RTX 4070 SUPER": 71.0,
    "Tesla V100-PCIE-32GB": 112.0,
    "Tesla V100S-PCIE-32GB": 130.0,
    "AMD Instinct MI300X": 1307.4,
    **dict.fromkeys(["Tesla P100-PCIE-16GB", "Quadro RTX 6000", "NVIDIA GeForce RTX 4090 Laptop GPU", ""]),
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": None,
}


@pytest.mark.parametrize("device_name", TERAFLOPS)
def test_peak_flops_of_a_gpu_is_that_of_the_table_or_unknown(device_name: str) -> None:
    expected = TERAFLOPS[device_name]
    assert peak_flops_of(device_name) == (None if expected is None else pytest.approx(expected * 1e12))


def test_peak_flops_asks_torch_for_the_name_of_that_device(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {0: "NVIDIA L4", 1: "NVIDIA H200"}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[device.index])
    assert peak_flops(torch.device("cuda", 1)) == pytest.approx(989e12)
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("names", "teraflops"),
    [(["NVIDIA L4", "NVIDIA H200"], 1110.0), (["NVIDIA L4"] * 8, 968.0), (["NVIDIA L4", "another"], None), ([], None)],
)
def test_cards_of_a_node_add_up_where_all_are_known(names: list[str], teraflops: float | None) -> None:
    assert peak_flops_of_all(names) == (None if teraflops is None else pytest.approx(teraflops * 1e12))


def test_no_row_of_the_table_is_hidden_by_one_before_it() -> None:
    assert all(peak_flops_of(name) == peak * 1e12 for name, peak in PEAK_BF16_TERAFLOPS)


def test_resident_bytes_grows_by_the_memory_that_is_touched() -> None:
    before = resident_bytes()
    if before is None:
        pytest.skip("no /proc on this system")
    size_bytes = 32 * 2**20
    with mmap.mmap(-1, size_bytes) as memory:
        memory.write(b"x" * size_bytes)
        after = resident_bytes()
    assert after is not None
    assert 0.9 * size_bytes < after - before < 4 * size_bytes
