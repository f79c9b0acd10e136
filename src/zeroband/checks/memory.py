"""Checks of this machine's memory: shared memory, the ranks' memory, and GPUs."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from zeroband.checks.finding import Finding
from zeroband.checks.needs import CPU_PROCESS_BYTES, NCCL_BYTES, Needs
from zeroband.config.outer import DilocoConfig
from zeroband.data.tokenizer import tokenizer_of
from zeroband.errors import ConfigError, MachineUnfit
from zeroband.node.identity import node_id_of
from zeroband.node.launched import local_world_size, machines
from zeroband.node.shm import NodeFolder
from zeroband.observe.words import human_bytes

if TYPE_CHECKING:
    import torch

    from zeroband.checks.gpu_prediction import GpuRun

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_NCCL_FOLDER = Path("/dev/shm")
_NO_GPU = ("", "-1")
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DEVICES = ("nvidia[0-9]*", "dxg", "kfd")
"""Device files of drivers: NVIDIA's, those under WSL, AMD's."""

_LESS = 0.9
"""Fraction of the predicted memory to aim for after running out of it."""


def shared_memory(needs: Needs, environ: Mapping[str, str]) -> Finding:
    """Check the space for the canonical state and NCCL; this node's present files count as free."""
    config, what = needs.config, "shared memory"
    folder = config.node.shm_dir
    if not folder.is_dir():
        advice = "set node.shm_dir to a memory file system"
        return Finding(what, f"node.shm_dir={str(folder)!r} is no folder", advice, stops="start")
    own = _own_folder(needs)
    free = shutil.disk_usage(folder).free + _held_bytes(own)
    left = NCCL_BYTES if _has_nccl(needs, environ) and _is_on_nccl_memory(folder) else 0
    and_nccl = f", and NCCL {human_bytes(left)}" if left else ""
    seen = f"{human_bytes(free)} free in {folder}, this model needs {human_bytes(needs.shared_bytes)}{and_nccl}"
    if free >= needs.shared_bytes + left:
        return Finding(what, seen)
    return Finding(
        what, seen, "raise it (docker: --shm-size; else remount with size=), or set node.shm_dir", stops="start"
    )


def _has_nccl(needs: Needs, environ: Mapping[str, str]) -> bool:
    return local_world_size(environ) > 1 and needs.config.train.device in (None, "cuda") and has_gpu(environ)


def _is_on_nccl_memory(folder: Path) -> bool:
    """Whether a folder is on the memory file system that NCCL uses."""
    return _NCCL_FOLDER.is_dir() and folder.stat().st_dev == _NCCL_FOLDER.stat().st_dev


def host_memory(needs: Needs, environ: Mapping[str, str]) -> Finding:
    """Check the memory for the canonical state and, without a GPU, for training."""
    has_memory_of_its_own = needs.config.train.device in (None, "cuda") and has_gpu(environ)
    trains = needs.training_bytes + CPU_PROCESS_BYTES * local_world_size(environ)
    needed = needs.shared_bytes + (0 if has_memory_of_its_own else trains)
    missing = needed - min(needs.shared_bytes, _held_bytes(_own_folder(needs)))
    limit, free = _limit_and_free()
    seen = (
        f"{human_bytes(free)} of {human_bytes(limit)} free, this model needs {human_bytes(needed)} and its activations"
    )
    advice = "use a smaller model or a machine with more memory, or end other processes"
    stops = "start" if needed > limit else "finish" if missing > free else None
    return Finding("memory", seen, advice if stops else "", stops=stops)


def gpus(needs: Needs, device: torch.device, local_world_size: int) -> Iterator[Finding]:
    """Check the GPUs' features for a run. Loads torch."""
    from zeroband.kernels.codec import CODECS
    from zeroband.outer.device_state import require_device

    config = needs.config
    if isinstance(config.outer, DilocoConfig):
        try:
            require_device(config.outer, CODECS[config.codec_name], device)
        except ConfigError as error:
            yield Finding("outer state", "does not fit on a GPU", str(error), stops="start")
    yield from gpu_memory(needs, local_world_size)


def gpu_memory(needs: Needs, local_world_size: int, *, rank: int | None = None) -> Iterator[Finding]:
    """Check a rank's GPU against the predicted peak of a step; None: all ranks' GPUs.

    Loads torch, and with a GPU FSDP2; takes half a gigabyte of a GPU. Creates a default process group for the
    rehearsal, so call it before this process has one. Raises ConfigError if the tokenizer cannot be opened.
    """
    import torch

    if needs.config.train.device not in (None, "cuda") or not (gpus := torch.cuda.device_count()):
        return
    from zeroband.checks.gpu_prediction import least_bytes, predict_gpu, way_out

    predicted: dict[int, int] = {}  # by GPU memory
    for index in range(min(gpus, local_world_size)) if rank is None else [rank % gpus]:
        free, total = torch.cuda.mem_get_info(index)
        run, ranks = _run_on_gpu(needs, local_world_size, total)
        try:
            if total not in predicted:
                predicted[total] = ranks * predict_gpu(run).peak_bytes
        except (ImportError, AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            # the rehearsal depends on torch internals; training does not
            yield Finding(f"GPU {index}", f"{human_bytes(free)} free; cannot predict what this run takes: {error!r}")
            continue
        needed = predicted[total]
        seen = f"{human_bytes(free)} of {human_bytes(total)} free, this run is predicted to take {human_bytes(needed)}"
        if needed <= free:
            yield Finding(f"GPU {index}", seen)
        elif needed <= total:
            yield Finding(f"GPU {index}", seen, "end the other processes on it", stops="finish")
        else:
            stops = "start" if ranks * least_bytes(run) > total else "finish"
            yield Finding(f"GPU {index}", seen, way_out(run, run.gpu_bytes), stops=stops)


def out_of_gpu_memory(error: Exception, needs: Needs, local_world_size: int) -> MachineUnfit | None:
    """Return advice after this rank's GPU ran out of memory; None for another error.

    Call it after closing this process's default process group. Loads torch.
    """
    import torch

    if not isinstance(error, torch.OutOfMemoryError):
        return None
    from zeroband.checks.gpu_prediction import predict_gpu, way_out

    card, peak = torch.cuda.get_device_name(), torch.cuda.max_memory_allocated()
    run, _ = _run_on_gpu(needs, local_world_size, torch.cuda.mem_get_info()[1])
    happened = (
        f"out of memory on {card}, of which a rank has {human_bytes(run.gpu_bytes)}: its tensors took "
        f"{human_bytes(peak)} at the peak"
    )
    try:
        predicted = predict_gpu(run).peak_bytes
    except NotImplementedError:
        return MachineUnfit(f'{happened}; lower train.micro_bs, or set train.activation_checkpointing = "full"')
    return MachineUnfit(
        f"{happened}, {human_bytes(predicted)} were predicted in all; "
        f"{way_out(run, min(run.gpu_bytes, int(_LESS * predicted)))}"
    )


def _run_on_gpu(needs: Needs, local_world_size: int, total_bytes: int) -> tuple[GpuRun, int]:
    """Return the run of a rank, and the number of ranks on its GPU. Opens the tokenizer for an unknown vocabulary."""
    import torch

    from zeroband.checks.gpu_prediction import GpuRun

    ranks = ranks_on_gpu(local_world_size // machines(os.environ), torch.cuda.device_count(), os.environ)
    vocab_size = needs.vocab_size or tokenizer_of(needs.config.data).padded_vocab_size
    return GpuRun(replace(needs, vocab_size=vocab_size), local_world_size, total_bytes // ranks), ranks


def ranks_on_gpu(local_world_size: int, seen: int, environ: Mapping[str, str]) -> int:
    """Return how many ranks share a GPU, if each rank sees `seen` of them.

    If a launcher shows each rank one GPU, they are taken to be different: ranks have not compared their cards yet, and
    a run that fits must not be refused.
    """
    is_one_of_many = seen == 1 and any(environ.get(name) for name in _VISIBLE)
    return 1 if is_one_of_many else -(-local_world_size // seen)


def has_gpu(environ: Mapping[str, str]) -> bool:
    """Whether training would use a GPU, as far as known without loading torch."""
    try:
        can_use = not version("torch").endswith("+cpu")
    except PackageNotFoundError:
        can_use = False
    visible = environ.get("CUDA_VISIBLE_DEVICES", "all").split(",")[0].strip()
    return can_use and visible not in _NO_GPU and any(file for kind in _DEVICES for file in Path("/dev").glob(kind))


def _own_folder(needs: Needs) -> Path:
    config = needs.config
    return NodeFolder.path_of(config.node.shm_dir, config.run.id, node_id_of(config))


def _held_bytes(folder: Path) -> int:
    try:
        return sum(512 * file.stat().st_blocks for file in folder.iterdir())
    except OSError:
        return 0


def _limit_and_free() -> tuple[int, int]:
    """Return this process's memory limit and the free memory, in bytes."""
    known = _meminfo()
    limit, free = known["MemTotal"] + known["SwapTotal"], known["MemAvailable"] + known["SwapFree"]
    if (most := _number(_CGROUP / "memory.max")) is not None:
        limit = min(limit, most)
        free = min(free, max(0, most - (_number(_CGROUP / "memory.current") or 0) + _reclaimable()))
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        limit, free = min(limit, address_space), min(free, address_space)
    return limit, free


def _meminfo() -> dict[str, int]:
    lines = (line.split() for line in _MEMINFO.read_text(encoding="ascii").splitlines())
    return {name.rstrip(":"): 1024 * int(number) for name, number, *_ in lines}


def _reclaimable() -> int:
    """Return the bytes of the container's file cache, which are freed on demand."""
    try:
        lines = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("inactive_file ")), 0)


def _number(file: Path) -> int | None:
    """Return a limit of the container, if set."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
