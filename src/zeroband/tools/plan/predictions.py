"""The table of presets on common GPUs in docs/gpu.md; `python -m zeroband.tools.plan.predictions` prints it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

from zeroband.checks.gpu_prediction import GpuRun, predict_gpu
from zeroband.checks.needs import Needs
from zeroband.observe.hardware import peak_flops_of
from zeroband.observe.words import human_bytes
from zeroband.tools.plan.memory import planned_config, step_seconds

MFU = 0.4
"""As stated in docs/gpu.md."""

_CARDS = {"RTX 4090": 24, "A100": 80, "H100": 80}
"""Memory in gigabytes."""

_HEAD = """\
| preset | GPUs | settings | memory of each | fits | inner step | tokens/s |
|---|---|---|---|---|---|---|
"""


@dataclass(frozen=True)
class _Case:
    preset: str
    vocab_size: int
    gpus: int
    settings_24_gb: tuple[str, ...]
    """Settings that a GPU of 24 GB needs on top of the preset."""


_CASES = (
    _Case("150M", 32_000, 1, ("--train.micro_bs", "16")),
    _Case("1B", 32_000, 1, ("--train.activation_checkpointing", "full")),
    _Case("10B", 128_256, 8, ("--train.activation_checkpointing", "full", "--optim.state_dtype", "int8")),
)


def document(*presets: str) -> str:
    """Return the table for these presets, by default all."""
    cases = [case for case in _CASES if not presets or case.preset in presets]
    return _HEAD + "".join(f"| {' | '.join(row)} |\n" for case in cases for row in _rows(case))


def _rows(case: _Case) -> Iterator[tuple[str, ...]]:
    peaks: dict[int, int] = {}  # by the gigabytes of a card
    for card, size in _CARDS.items():
        settings = case.settings_24_gb if size == 24 else ()
        config = planned_config([f"@{case.preset}", *settings])
        needs = Needs(config, case.vocab_size)
        if size not in peaks:
            peaks[size] = predict_gpu(GpuRun(needs, case.gpus, size * 10**9)).peak_bytes
        flops = peak_flops_of(f"NVIDIA {card}")
        assert flops is not None, f"observe/hardware.py knows every card of this table, and not {card}"
        step_s = step_seconds(needs, gpus=case.gpus, flops=flops, mfu=MFU)
        tokens = config.train.batch_size * config.data.seq_length
        yield (
            f"`{case.preset}`",
            f"{case.gpus} x {card}, {size} GB",
            f"`{' '.join(settings)}`" if settings else "its own",
            human_bytes(peaks[size]),
            "yes" if peaks[size] <= size * 10**9 else "no",
            f"{step_s:.3g} s",
            f"{tokens / step_s:,.0f}",
        )


if __name__ == "__main__":
    sys.stdout.write(document())
