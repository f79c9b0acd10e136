"""Rehearses an inner step of the trainer's code on fake tensors to measure a rank's GPU memory: sizes without bytes.

Fake tensors are on the CPU, where torch without CUDA can differentiate them. Compilation is not rehearsed: it fuses
temporaries. Moments are rehearsed in float32. Loads torch and FSDP2, and uses the default process group while it runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zeroband.config.model import LlamaConfig
from zeroband.config.outer import DemoConfig
from zeroband.config.schema import RunConfig
from zeroband.config.training import Placement
from zeroband.model.attention import attend_plain, varlen_attention
from zeroband.model.optim import InnerOptimizer
from zeroband.model.transformer import Transformer
from zeroband.node.mesh import LocalMesh, allocate, begin_micro_batch, clip_grad_norm_, parallelize

Kind = Literal["parameters", "gradients", "optimizer", "activations", "gathered", "loss", "temporary"]
"""Purpose of bytes. gathered: whole parameters in the compute type, and buffers for gathering them."""

KINDS: tuple[Kind, ...] = get_args(Kind)
Bytes = Mapping[Kind, int]
Moment = tuple[str, ...]
"""A part of a step: the pass, and the place in it; equal words for deep and shallow models."""

EDGE = 1
"""Blocks at each end of the model whose moments differ from those in between."""

_DOCUMENTS = 16
"""Documents of a micro-batch; their borders take a few bytes."""


@dataclass(slots=True)
class _Storage:
    """Record of a storage, which outlives it."""

    nbytes: int
    kind: Kind | None
    reference: weakref.ref[torch.UntypedStorage]


class StorageTracker(TorchDispatchMode):
    """Sums up the living storages of a fake mode, and records the peak of each moment.

    torch's own FSDP2 tracker agrees on the sum (tested), but does not know this optimizer, nor tell gradients and the
    loss from temporaries.
    """

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        super().__init__()
        self.new_kind: Kind | None = None
        """Purpose of new storages; None: `assign_kind` decides."""
        self._fake_mode = fake_mode
        self._storages: dict[int, _Storage] = {}
        self._bytes = self._peak_bytes = 0
        self._moment: Moment = ("setup",)
        self._peaks: dict[Moment, list[tuple[_Storage, int]]] = {}

    def begin(self, moment: Moment) -> None:
        """Start the peak of this moment."""
        self._moment, self._peak_bytes = moment, 0
        self._note_peak()

    @contextmanager
    def kind_of_new(self, kind: Kind) -> Generator[None]:
        """Set the purpose of storages that are created within."""
        self.new_kind = kind
        yield
        self.new_kind = None

    def assign_kind(self, kind: Kind) -> None:
        """Set the purpose of all living storages without one."""
        for storage in self._storages.values():
            storage.kind = storage.kind or kind

    def peaks(self) -> dict[Moment, Bytes]:
        """Return the bytes at the peak of each moment."""
        found: dict[Moment, dict[Kind, int]] = {}
        empty = dict.fromkeys(KINDS, 0)
        for moment, living in self._peaks.items():
            of = found[moment] = empty.copy()
            for storage, nbytes in living:
                of[storage.kind or "temporary"] += nbytes
        return dict(found)

    def __enter__(self) -> StorageTracker:
        resize = self._resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if (known := self._storages.get(id(storage))) is not None:
                self._add(size - known.nbytes)
                known.nbytes, known.kind = size, "gathered"  # FSDP2 resizes storages to allocate and free them

        torch.UntypedStorage.resize_ = noted  # pyright: ignore[reportAttributeAccessIssue]: no dispatch tells of it
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # called again for its parts
        result = func(*args, **(kwargs or {}))
        is_gather = "all_gather" in str(func)
        for tensor in tree_leaves(result):
            if isinstance(tensor, FakeTensor) and tensor.fake_mode is self._fake_mode:
                self._see(tensor.untyped_storage(), "gathered" if is_gather else self.new_kind)
        return result

    def _see(self, storage: torch.UntypedStorage, kind: Kind | None) -> None:
        key = id(storage)
        if key not in self._storages:
            reference = weakref.ref(storage, lambda _, key=key: self._forget(key))
            self._storages[key] = _Storage(storage.nbytes(), kind, reference)
            self._add(storage.nbytes())

    def _forget(self, key: int) -> None:
        self._add(-self._storages.pop(key).nbytes)

    def _add(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > self._peak_bytes:
            self._note_peak()

    def _note_peak(self) -> None:
        self._peak_bytes = self._bytes
        self._peaks[self._moment] = [(storage, storage.nbytes) for storage in self._storages.values()]


def rehearse(config: RunConfig, vocab_size: int, *, ranks: int, placed: Placement) -> dict[Moment, Bytes]:
    """Make one inner step of two micro-batches as the first of `ranks`; returns the bytes at each moment's peak."""
    train = config.train.model_copy(
        update={
            "compile": False,
            "reshard_after_forward": placed.reshard_after_forward,
            "reduce_gradients": "micro_batch" if placed.reduces_micro_batches else "step",
        }
    )
    share = config.train.batch_size // ranks
    rows = min(train.micro_bs, share)
    fake_mode = FakeTensorMode()
    with _fake_ranks(ranks) as local, fake_mode:
        with torch.device("meta"):
            assert isinstance(config.model, LlamaConfig)
            attend = varlen_attention() if train.dtype == "bfloat16" else attend_plain
            model = Transformer(config.model, vocab_size, attend)
        _fuse_norms(model)
        parallelize(model, train, local)
        with StorageTracker(fake_mode) as tracker:
            with tracker.kind_of_new("parameters"):
                allocate(model, local)
            with tracker.kind_of_new("optimizer"):
                rule = "sign" if isinstance(config.outer, DemoConfig) else "adamw"
                optim = config.optim.model_copy(update={"state_dtype": "float32"})
                inner = InnerOptimizer(model, optim, total_steps=train.total_steps, rule=rule)
            tokens = torch.zeros(rows, config.data.seq_length, dtype=torch.int64)
            borders = torch.zeros(_DOCUMENTS, dtype=torch.int32) if config.data.document_mask else None
            passes, count = _Passes(model, tracker), min(2, -(-share // rows))
            for number in range(count):
                begin_micro_batch(model, placed, is_last=number + 1 == count)
                passes.begin(number)
                loss = model(tokens, borders, tokens, config.optim.z_loss).objective * 1.0
                passes.begin_backward()
                loss.backward()
                del loss
                tracker.assign_kind("gradients")
            tracker.begin(("step",))
            clip_grad_norm_(model, config.optim.clip_norm)
            inner.step()
            return tracker.peaks()


def _fuse_norms(model: nn.Module) -> None:
    """Make norms keep what they keep on a GPU. On a CPU torch composes them of operations that keep more."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(_normed, module)


def _normed(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    return _FusedNorm.apply(x, norm.weight)  # pyright: ignore[reportReturnType]


class _FusedNorm(torch.autograd.Function):
    """The sizes of torch's RMSNorm kernel: keeps its input and a float32 per row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x, weight, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, _rows = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Passes:
    """Tells the tracker the model's place in the passes: which of its first or last blocks, or the loss."""

    def __init__(self, model: Transformer, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self._pass = ""
        last = len(model.layers) - 1
        for i, block in enumerate(model.layers):
            name = f"block {i}" if i < EDGE else f"block {i - last - 1}" if last - i < EDGE else "blocks between"
            block.register_forward_pre_hook(partial(self._before_block, name))
            block.register_forward_hook(partial(self._after_block, name))
        model.norm.register_forward_hook(self._before_loss)

    def begin(self, number: int) -> None:
        self._pass = str(number)
        self._enter("forward", "embedding")

    def _enter(self, *where: str) -> None:
        self._tracker.begin((self._pass, *where))

    def _before_block(self, name: str, *_: object) -> None:
        self._enter("forward", name)

    def _after_block(self, name: str, _block: nn.Module, _inputs: object, output: Tensor) -> None:
        output.register_hook(partial(self._before_backward, name))

    def _before_backward(self, name: str, _gradient: Tensor) -> None:
        self._enter("backward", name)

    def _before_loss(self, *_: object) -> None:
        self._tracker.assign_kind("activations")
        self._tracker.new_kind = "loss"
        self._enter("loss")

    def begin_backward(self) -> None:
        self._tracker.new_kind = None
        self._enter("backward", "loss")


@contextmanager
def _fake_ranks(ranks: int) -> Generator[LocalMesh]:
    """Simulate the first of `ranks` with a fake process group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        assert dist.group.WORLD is not None
        yield LocalMesh(0, ranks, torch.device("cpu"), mesh, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
