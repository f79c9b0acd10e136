"""An outer round's work on a GPU: its passes beside the card's copy bandwidth, and the bytes that cross PCIe.

kernels     GB/s of each pass, in Triton and in plain torch, over those of a copy on the same card
dct         the same of DeMo's transform: the 4 largest of each 64 x 64 chunk, and the chunks that these make
round       a contribution and an outer step with the outer state on the GPU and on the CPU: bytes by the profiler's
            count, and seconds

  python bench/kernels.py [kernels] [dct] [round] [--numel 268435456] [--least 0.85]

Needs an NVIDIA GPU; `round` needs the package's dependencies too, the others only torch and triton. A pass that dies is
a row that says why. Ends with 1 where one did, or where a pass of `kernels` in Triton stays below --least of a copy.
--on cpu tries the program out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence import count, require_known
from torch import Tensor, nn

from zeroband.kernels import dct_kernels, fused
from zeroband.kernels.dct_kernels import DctKernels, dct_kernels_on
from zeroband.kernels.fused import BLOCK, OuterStep, Passes, passes_on

REPEATS = 30
WARM_UP = 5
RULE = OuterStep(0.7, 0.9, is_nesterov=True)
DEVICE = torch.device("cuda")
"""Where everything is measured; `main` may choose another."""

SIDE, CHOSEN = 64, 4
"""Of DeMo's chunks, and how many of a chunk's waves are sent."""


@dataclass(frozen=True)
class Work:
    """Something that a GPU does over and over. `moved_bytes`: what it has to read and write at least, once."""

    name: str
    moved_bytes: int
    run: Callable[[], object]

    def seconds(self) -> float:
        """Of one run, by the card's own clock."""
        if DEVICE.type == "cpu":
            began_at_s = time.perf_counter()
            self.run()
            return time.perf_counter() - began_at_s
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def copies(numel: int) -> Work:
    source, target = torch.randn(numel, device=DEVICE), torch.empty(numel, device=DEVICE)
    return Work("copy, float32", 8 * numel, lambda: target.copy_(source))


def encoding(passes: Passes, kind: str, numel: int, dtype: torch.dtype) -> Work:
    outer = torch.randn(numel, device=DEVICE)
    inner = (outer + 1e-3 * torch.randn(numel, device=DEVICE)).to(dtype)
    scales = torch.empty(numel // BLOCK, device=DEVICE)
    codes = torch.empty(numel, dtype=torch.int8, device=DEVICE)
    has_bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    moved = sum(t.nbytes for t in (outer, inner, scales, codes))
    name = f"pseudo-gradient and int8, {name_of(dtype)}, {kind}"
    return Work(name, moved, lambda: passes.encode_difference(outer, inner, scales, codes, has_bad))


def stepping(passes: Passes, kind: str, numel: int, dtype: torch.dtype) -> Work:
    scales = 1e-6 * torch.rand(numel // BLOCK, device=DEVICE)
    codes = torch.randint(-127, 128, (numel,), dtype=torch.int8, device=DEVICE)
    params, momentum = torch.randn(numel, device=DEVICE), torch.zeros(numel, device=DEVICE)
    inner = torch.empty(numel, dtype=dtype, device=DEVICE)
    moved = scales.nbytes + codes.nbytes + 2 * params.nbytes + 2 * momentum.nbytes + inner.nbytes
    name = f"int8, Nesterov and write-back, {name_of(dtype)}, {kind}"
    return Work(name, moved, lambda: passes.take_step(scales, codes, 0, params, momentum, inner, RULE))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def choosing(kernels: DctKernels, kind: str, numel: int) -> Work:
    chunks = torch.randn(numel // SIDE**2, SIDE, SIDE, device=DEVICE)
    moved = chunks.nbytes + 8 * CHOSEN * len(chunks)
    return Work(f"largest waves, {kind}", moved, lambda: kernels.choose(chunks, CHOSEN))


def restoring(kernels: DctKernels, kind: str, numel: int) -> Work:
    count = numel // SIDE**2
    places = torch.randint(0, SIDE**2 - CHOSEN, (count, 1), device=DEVICE) + torch.arange(CHOSEN, device=DEVICE)
    places, values = places.int(), torch.randn(count, CHOSEN, device=DEVICE)
    moved = 4 * SIDE**2 * count + 8 * CHOSEN * count
    return Work(f"chunks of waves, {kind}", moved, lambda: kernels.restore(places, values, SIDE, SIDE))


def compare_kernels(numel: int, least: float | None) -> bool:
    """Print the table of `kernels`; returns whether an aim is missed or a pass died."""
    numel = numel // BLOCK * BLOCK
    kinds: list[tuple[str, Passes]] = [("plain torch", fused)]
    if DEVICE.type == "cuda":
        kinds.insert(0, ("Triton", passes_on(DEVICE)))
    makers = [
        (make.__name__, kind, lambda make=make, kind=kind, passes=passes, dtype=dtype: make(passes, kind, numel, dtype))
        for kind, passes in kinds
        for make in (encoding, stepping)
        for dtype in (torch.bfloat16, torch.float32)
    ]
    return compare(makers, numel, least)


def compare_dct(numel: int) -> bool:
    """Print the table of `dct`; of fewer values, since plain torch needs memory for float64."""
    numel = min(numel, 1 << 26) // SIDE**2 * SIDE**2
    kinds: list[tuple[str, DctKernels]] = [("plain torch", dct_kernels)]
    if DEVICE.type == "cuda":
        kinds.insert(0, ("Triton", dct_kernels_on(DEVICE, longest=SIDE)))
    makers = [
        (make.__name__, kind, lambda make=make, kind=kind, kernels=kernels: make(kernels, kind, numel))
        for kind, kernels in kinds
        for make in (choosing, restoring)
    ]
    return compare(makers, numel, None)


def compare(makers: Sequence[tuple[str, str, Callable[[], Work]]], numel: int, least: float | None) -> bool:
    """Print a table: each work beside a copy, in turns. Returns whether one died or, in Triton, is below `least`."""
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU"
    print(f"\n{name}, torch {torch.__version__}, {numel / 1e6:.0f} M values, {REPEATS} times\n")
    print("| pass | GB/s, median | GB/s, best | of a copy, medians | of a copy, bests |\n|---|---|---|---|---|")
    copy, is_missed = copies(numel), False
    for what, kind, maker in makers:
        try:
            work = maker()
            laps = [(copy.seconds(), work.seconds()) for _ in range(WARM_UP + REPEATS)][WARM_UP:]
        except Exception as error:  # noqa: BLE001 - of whatever a kernel dies, the next one is measured
            why = " ".join(str(error).split())[:200]
            print(f"| {what}, {kind} | failed: {type(error).__name__}: {why} | | | |", flush=True)
            is_missed = True
            continue
        rates = [[w.moved_bytes / lap[i] / 1e9 for lap in laps] for i, w in enumerate((copy, work))]
        (copy_mid, mid), (copy_best, best) = (list(map(f, rates)) for f in (statistics.median, max))
        print(f"| {work.name} | {mid:.0f} | {best:.0f} | {mid / copy_mid:.2f} | {best / copy_best:.2f} |", flush=True)
        is_missed |= kind == "Triton" and least is not None and mid / copy_mid < least
        del work
        torch.cuda.empty_cache()
    rates_of_copy = [copy.moved_bytes / copy.seconds() / 1e9 for _ in range(REPEATS)]
    print(f"| {copy.name} | {statistics.median(rates_of_copy):.0f} | {max(rates_of_copy):.0f} | 1.00 | 1.00 |")
    if least is not None:
        print(f"\nAim, each pass in Triton: at least {least:g} of a copy; {'MISSED' if is_missed else 'met'}.")
    return is_missed


# -- a round ----------------------------------------------------------------------------------------------------------


def model_of(numel: int) -> nn.Module:
    """About so many float32 parameters: matrices of 4096 columns, norms between them, and one that ends in a block."""
    model, rows = nn.Module(), max(numel // 4096 // 16, 1)
    for i in range(16):
        weight = torch.randn(rows, 4096, device=DEVICE)
        model.register_parameter(f"layers_{i:02d}_weight", nn.Parameter(weight, requires_grad=False))
        norm = torch.randn(4096 if i < 15 else 1001, device=DEVICE)
        model.register_parameter(f"layers_{i:02d}_weight_norm", nn.Parameter(norm, requires_grad=False))
    return model


def crossing(work: Callable[[], object]) -> dict[str, int]:
    """Bytes that a piece of work has copied from the GPU ("DtoH") and to it ("HtoD"), by the profiler's count."""
    if DEVICE.type == "cpu":
        work()
        return {"DtoH": 0, "HtoD": 0}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    moved: dict[str, int] = {"DtoH": 0, "HtoD": 0}
    for event in events:
        for way in moved:
            if event.get("cat") == "gpu_memcpy" and way in event["name"]:
                moved[way] += event["args"]["bytes"]
    return moved


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def best_s(work: Callable[[], object]) -> float:
    laps: list[float] = []
    for _ in range(3):
        synchronize()
        began_at_s = time.monotonic()
        work()
        synchronize()
        laps.append(time.monotonic() - began_at_s)
    return min(laps)


def compare_rounds(numel: int) -> None:
    """Print the table of `round`."""
    from zeroband.config.outer import OuterSGDConfig
    from zeroband.kernels.codec import CODECS
    from zeroband.node.async_copy import host_copies
    from zeroband.node.mesh import init_local_mesh
    from zeroband.outer.device_state import DeviceState
    from zeroband.outer.outer_optimizer import OuterSGD
    from zeroband.state.digest import digest_of
    from zeroband.state.flat import FlatLayout, ShardMap, SharedBuffers, parameter_shards

    codec, optimizer = CODECS["int8"], OuterSGD(OuterSGDConfig())
    model = model_of(numel)
    layout, shards = FlatLayout.of(model), parameter_shards(model)
    places, n = ShardMap(layout, 0, 1), layout.numel
    local = init_local_mesh({})
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        buffers = SharedBuffers(Path(folder), n, local)
        buffers.open("params", "momentum", "contribution", "result")
        params, momentum, contribution = (buffers[name] for name in ("params", "momentum", "contribution"))
        places.store(shards, params)
        state = {"params": params, "momentum": momentum}
        device = DeviceState(buffers, places, optimizer, DEVICE, lambda: shards, **state)

        def send_from_gpu() -> None:
            device.contribute()
            device.encode_borders()

        outer, out = dict(places.parts(params, shards)), dict(places.parts(contribution, shards))

        def send_from_cpu(copies: Callable[[Iterable[Tensor]], Iterable[Tensor]]) -> None:
            for name, inner in zip(out, copies(shards[name] for name in out), strict=True):
                optimizer.contribution(outer[name], inner.reshape(-1), out[name])

        def load_unpinned() -> None:
            for name, part in places.held(params, shards):
                shards[name].detach().copy_(part.view(shards[name].shape))

        device.encoded.result.copy_(codec.encode(1e-3 * torch.randn(n)))
        ways: list[tuple[str, str, Callable[[], object]]] = [
            ("GPU", "contribution", send_from_gpu),
            ("GPU", "step on the GPU, inner parameters", lambda: device.take_step(outer_step=1)),
            ("CPU", "pseudo-gradient", lambda: send_from_cpu(host_copies)),
            ("CPU", "pseudo-gradient, not pinned", lambda: send_from_cpu(lambda held: (one.to("cpu") for one in held))),
            ("CPU", "encoding", lambda: codec.encode(contribution)),
            ("CPU", "outer SGD", lambda: optimizer.apply(params, momentum, contribution, outer_step=1)),
            ("CPU", "inner parameters", lambda: places.load(shards, params)),
            ("CPU", "inner parameters, not pinned", load_unpinned),
            ("CPU", "digest", lambda: digest_of(params, momentum)),
        ]
        print(f"\n{n / 1e6:.1f} M float32 parameters, int8, one rank\n")
        print("| outer state | work | bytes from the GPU, each parameter | to it | s, best |\n|---|---|---|---|---|")
        for where, what, work in ways:
            work()
            moved = crossing(work)
            took = f"{moved['DtoH'] / n:.4f} | {moved['HtoD'] / n:.4f} | {best_s(work):.4f}"
            print(f"| {where} | {what} | {took} |", flush=True)
    local.close()


def main() -> None:
    global DEVICE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ("kernels", "dct", "round")
    parser.add_argument("what", nargs="*", default=known)
    parser.add_argument("--numel", type=count, default=1 << 28)
    parser.add_argument("--least", type=float, help="aim: of a copy's bytes each second, for passes in Triton")
    parser.add_argument("--on", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    require_known(parser, arguments.what, known)
    DEVICE = torch.device(arguments.on)
    if DEVICE.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("there is no NVIDIA GPU here; nothing is measured")
    is_missed = False
    if "kernels" in arguments.what:
        is_missed |= compare_kernels(arguments.numel, arguments.least)
    if "dct" in arguments.what:
        is_missed |= compare_dct(arguments.numel)
    if "round" in arguments.what:
        compare_rounds(arguments.numel)
    raise SystemExit(int(is_missed))


if __name__ == "__main__":
    main()
