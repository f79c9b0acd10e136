"""Peak FLOP/s of GPUs, memory of this process and disk space. Uses torch only when called."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_TERA = 1e12

PEAK_BF16_TERAFLOPS: tuple[tuple[str, float], ...] = (
    # NVIDIA's data sheets of each product: half of "with sparsity"
    ("GB300", 2500.0),
    ("GB200", 2500.0),
    ("B300", 2250.0),
    ("B200", 2250.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("GH200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIE", 756.0),
    ("H100", 989.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10", 125.0),
    ("A10G", 70.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L20", 119.5),
    ("L4", 121.0),
    ("RTX A6000", 154.8),
    ("RTX A5000", 111.1),
    ("RTX A4000", 76.7),
    ("RTX 6000 ADA", 364.2),
    ("RTX 5000 ADA", 261.1),
    # tensor cores without bfloat16: float16, the usual base of comparison
    ("V100S", 130.0),
    ("V100 PCIE", 112.0),
    ("V100", 125.0),
    ("T4", 65.0),
    # white papers "NVIDIA RTX Blackwell", "Ada" and "Ampere GA102 GPU Architecture": BF16 with FP32 accumulate
    ("RTX 5090", 209.5),
    ("RTX 5080", 112.6),
    ("RTX 5070 TI", 87.9),
    ("RTX 5070", 61.7),
    ("RTX 5060 TI", 47.4),
    ("RTX 5060", 38.4),
    ("RTX 4090 D", 147.1),
    ("RTX 4090", 165.2),
    ("RTX 4080 SUPER", 104.4),
    ("RTX 4080", 97.5),
    ("RTX 4070 TI SUPER", 88.2),
    ("RTX 4070 TI", 80.2),
    ("RTX 4070 SUPER", 71.0),
    ("RTX 4070", 58.3),
    ("RTX 4060 TI", 44.1),
    ("RTX 4060", 30.2),
    ("RTX 3090 TI", 80.0),
    ("RTX 3090", 71.0),
    ("RTX 3080 TI", 68.2),
    ("RTX 3080", 59.5),
    ("RTX 3070 TI", 43.5),
    ("RTX 3070", 40.6),
    ("RTX 3060 TI", 32.4),
    ("RTX 3060", 25.5),
    # AMD's data sheets; each die of a two-die card is a device
    ("MI355X", 2516.6),
    ("MI350X", 2306.9),
    ("MI325X", 1307.4),
    ("MI300X", 1307.4),
    ("MI300A", 980.6),
    ("MI250X", 191.5),
    ("MI250", 181.0),
    ("MI210", 181.0),
)
"""Dense bfloat16 matrix throughput with float32 accumulation of one device, as stated by vendors.

The first row whose words all occur in the device's name counts.
"""

_NOT_THE_WHOLE_DEVICE = {"MIG", "LAPTOP"}


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device; None, and so no MFU, for CPUs and unknown GPUs."""
    if device.type != "cuda":
        return None
    import torch

    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of_all(device_names: Iterable[str]) -> float | None:
    """Return the total dense bfloat16 FLOP/s of some GPUs; None without GPUs or if one is unknown."""
    each = [peak_flops_of(name) for name in device_names]
    known = [peak for peak in each if peak is not None]
    return sum(known) if known and len(known) == len(each) else None


def peak_flops_of(device_name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a GPU by its driver's name; None for MIG slices and laptop GPUs."""
    words = set(re.findall(r"[A-Z0-9]+", device_name.upper()))
    if words & _NOT_THE_WHOLE_DEVICE:
        return None
    for pattern, teraflops in PEAK_BF16_TERAFLOPS:
        if words.issuperset(pattern.split()):
            return teraflops * _TERA
    return None


def resident_bytes() -> int | None:
    """Return this process's resident memory, shared pages included; None without /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def disk_space(folder: Path) -> tuple[int, int] | None:
    """Return free (for this user) and total bytes of a folder's file system; of its first existing parent if needed."""
    try:
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        disk = os.statvfs(there)
    except OSError:
        return None
    return disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize


def free_ratio(folder: Path) -> float | None:
    """Return the free fraction of a folder's file system; None if unknown."""
    space = disk_space(folder)
    return None if space is None or not space[1] else space[0] / space[1]
