"""What sparse payloads cost here: `python bench/sparse.py [--values 16e6] [--device cuda]`.

Beside a float32 copy, and DeMo also beside the plain operations of its paper, whose decoded bits depend on the library.
DeMo packs in every step, so its extract and decode have to be small against a step; SparseLoCo's only against a round.
On a CPU times are of the processor, so other processes change them little.
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
from zeroband.kernels import dct
from zeroband.outer.demo import momentum_rule
from zeroband.outer.sparse.residual import SparseResidual
from zeroband.outer.sparseloco import error_rule
from zeroband.state.flat import FlatLayout, Slot

_PAYLOADS = 4


class PublishedDemo:
    """DeMo's compression as its paper has it (arXiv:2411.19870), on a square matrix of whole chunks."""

    def __init__(self, side: int, config: DemoConfig, device: torch.device) -> None:
        self._grid, self._chunk, self._k = side // config.chunk, config.chunk, config.k
        self._waves = dct.basis(config.chunk, device)

    def extract(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Take the largest coefficients of each chunk out of the momentum. Returns places and values, (chunks, k)."""
        chunks = memory.view(self._grid, self._chunk, self._grid, self._chunk)
        found = torch.einsum("yhxw,uh,vw->yxuv", chunks, self._waves, self._waves).flatten(2).flatten(0, 1)
        places = found.abs().topk(self._k, dim=1, sorted=False).indices
        values = found.gather(1, places)
        memory -= self.decode(places, values)
        return places, values

    def decode(self, places: Tensor, values: Tensor) -> Tensor:
        """Return the mean of what each place got, transformed back. Shapes: (chunks, k of all payloads)."""
        found = values.new_zeros(len(values), self._chunk**2)
        found.scatter_reduce_(1, places, values, reduce="mean", include_self=False)
        grid = found.view(self._grid, self._grid, self._chunk, self._chunk)
        return torch.einsum("yxuv,uh,vw->yhxw", grid, self._waves, self._waves).reshape(-1)


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
    print(f"{'':<12}{'bytes':>10}{'2N/bytes':>10}{'ms per 1e6 values':>20}{'of a copy':>12}{'of published':>14}")
    published = PublishedDemo(side, DemoConfig(type="demo"), x.device)
    places, values = (sent.repeat(1, _PAYLOADS) for sent in published.extract(x.clone()))
    memory = x.clone()
    published_s = [
        _median_s(work, x, options.runs)
        for work in (lambda: published.extract(memory), lambda: published.decode(places, values))
    ]
    momentum = momentum_rule(DemoConfig(type="demo"), layout)
    errors = error_rule(SparseLocoConfig(type="sparseloco"), layout)
    for name, feedback in (("DeMo", momentum), ("SparseLoCo", errors)):
        codec = feedback.codec
        print(f"{name:<12}{codec.nbytes:>10}{2 * codec.numel / codec.nbytes:>10.1f}")
        payload = codec.check(codec.encode(x).payload)
        out = torch.empty_like(x)
        took_s = [
            _median_s(work, x, options.runs)
            for work in (_extract(feedback, x), lambda c=codec, p=payload, o=out: c.decode([p] * _PAYLOADS, o))
        ]
        for what, ours_s, theirs_s in (
            ("extract", took_s[0], published_s[0]),
            (f"decode {_PAYLOADS}", took_s[1], published_s[1]),
            ("both", sum(took_s), sum(published_s)),
        ):
            beside = f"{ours_s / theirs_s:>14.2f}" if name == "DeMo" else ""
            print(f"  {what:<30}{1e9 * ours_s / layout.numel:>20.2f}{ours_s / copy_s:>12.0f}{beside}")


def _extract(feedback: SparseResidual, x: Tensor) -> Callable[[], object]:
    memory = x.clone()
    return lambda: feedback.extract(memory)


def _median_s(work: Callable[[], object], x: Tensor, runs: int) -> float:
    clock = time.perf_counter if x.is_cuda else time.process_time
    times: list[float] = []
    for _ in range(runs + 1):
        _finish(x)
        began_at_s = clock()
        work()
        _finish(x)
        times.append(clock() - began_at_s)
    return statistics.median(times[1:])


def _finish(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


if __name__ == "__main__":
    main()
