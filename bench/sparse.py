"""What sparse payloads cost here, beside a float32 copy: `python bench/sparse.py [--values 16e6] [--device cuda]`.

DeMo packs in every step, so its extract and decode have to be small against a step; SparseLoCo's only against a round.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch
from evidence import count
from torch import Tensor

from zeroband.config.outer import DemoConfig, SparseLocoConfig
from zeroband.outer.demo import momentum_rule
from zeroband.outer.sparse.residual import SparseResidual
from zeroband.outer.sparseloco import error_rule
from zeroband.state.flat import FlatLayout, Slot

_PAYLOADS = 4


def main() -> None:
    """Print seconds for a million values, the median of some runs, and payload sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--values", type=float, default=4e6)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=count, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    side = max(64, round(math.sqrt(options.values) / 64) * 64)
    layout = FlatLayout((Slot("matrix", (side, side), 0),))
    x = torch.randn(layout.numel, device=options.device)
    copy_s = _median_s(lambda: x.clone(), x, options.runs)
    print(f"{layout.numel} values on {x.device}, torch {torch.__version__}, {options.threads} threads")
    print(f"{'':<12}{'bytes':>10}{'2N/bytes':>10}{'ms per 1e6 values':>20}{'of a copy':>12}")
    momentum = momentum_rule(DemoConfig(type="demo"), layout)
    errors = error_rule(SparseLocoConfig(type="sparseloco"), layout)
    for name, feedback in (("DeMo", momentum), ("SparseLoCo", errors)):
        codec = feedback.codec
        print(f"{name:<12}{codec.nbytes:>10}{2 * codec.numel / codec.nbytes:>10.1f}")
        payload = codec.check(codec.encode(x).payload)
        out = torch.empty_like(x)
        for what, work in (
            ("extract", _extract(feedback, x)),
            (f"decode {_PAYLOADS}", lambda c=codec, p=payload, o=out: c.decode([p] * _PAYLOADS, o)),
        ):
            took_s = _median_s(work, x, options.runs)
            print(f"  {what:<30}{1e9 * took_s / layout.numel:>20.2f}{took_s / copy_s:>12.0f}")


def _extract(feedback: SparseResidual, x: Tensor) -> Callable[[], object]:
    memory = x.clone()
    return lambda: feedback.extract(memory)


def _median_s(work: Callable[[], object], x: Tensor, runs: int) -> float:
    times: list[float] = []
    for _ in range(runs + 1):
        _finish(x)
        began_at_s = time.perf_counter()
        work()
        _finish(x)
        times.append(time.perf_counter() - began_at_s)
    return statistics.median(times[1:])


def _finish(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


if __name__ == "__main__":
    main()
