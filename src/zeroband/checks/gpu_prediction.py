"""Predicts a run's peak memory on each GPU, and the settings that reduce it. Loads torch.

Tensors are counted by rehearsing a step of the trainer (`rehearsal.py`); the rest is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from zeroband.checks.needs import Needs
from zeroband.checks.rehearsal import EDGE, KINDS, Bytes, Moment, rehearse
from zeroband.config.model import LlamaConfig
from zeroband.config.outer import CustomConfig, DdpConfig, DemoConfig, DilocoConfig
from zeroband.config.schema import RunConfig
from zeroband.config.training import Placement, placement
from zeroband.data.index import require_even_shares
from zeroband.observe.words import human_bytes

CONTEXT_BYTES = 750_000_000
"""CUDA's context, loaded kernels and cuBLAS workspaces (32 MiB on Hopper). Assumed, not measured."""

NCCL_BYTES = 500_000_000
"""Buffers of one communicator: 32 channels that send and receive by ring and tree, 4 MiB each (NCCL_BUFFSIZE). Assumed,
not measured."""

MARGIN = 0.05
"""Fragmentation of the allocator as a fraction of the tensors' bytes. Assumed, not measured."""

_OUTER_STATE_BYTES = 8
"""Parameters and momentum of the outer optimizer, per parameter, with outer.state_device = "cuda"."""

_APPROXIMATE = ("optim.state_dtype",)
"""Settings that change results by more than rounding."""


@dataclass(frozen=True)
class GpuRun:
    """A run on a node's GPUs, one rank per GPU or share of it."""

    needs: Needs
    """With the size of the vocabulary."""
    ranks: int
    gpu_bytes: int
    """Memory of a GPU, or a rank's share of it."""

    @property
    def config(self) -> RunConfig:
        return self.needs.config

    @property
    def placement(self) -> Placement:
        return placement(self.config.train, params=self.needs.params, ranks=self.ranks, gpu_bytes=self.gpu_bytes)

    def with_settings(self, settings: Mapping[str, Any]) -> GpuRun:
        """Return the run with other values of some keys."""
        config = self.config
        for key, value in settings.items():
            name, _, field = key.partition(".")
            section = getattr(config, name).model_copy(update={field: value})
            config = config.model_copy(update={name: section})
        return replace(self, needs=replace(self.needs, config=config))


@dataclass(frozen=True)
class GpuPrediction:
    """Bytes on a GPU at the peak of an inner step."""

    tensors: Bytes
    outer_state: int
    untracked: int
    """Bytes outside of torch's allocator."""

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by purpose; they sum up to `peak_bytes`."""
        return {**self.tensors, "outer state": self.outer_state, "context": self.untracked, "margin": self.margin}

    @property
    def margin(self) -> int:
        return int(MARGIN * (sum(self.tensors.values()) + self.outer_state))

    @property
    def peak_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class SettingChange:
    """The memory of a run with other settings."""

    settings: Mapping[str, Any]
    """By key."""
    peak_bytes: int

    def __str__(self) -> str:
        words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in self.settings.items()}
        return " ".join(f"--{key} {word}" for key, word in words.items())


def predict_gpu(run: GpuRun) -> GpuPrediction:
    """Predict the peak of a rank's GPU. Raises ConfigError if the ranks cannot share the batch.

    Raises NotImplementedError for a model that is not this package's. Deep models are rehearsed with few blocks: each
    further block adds exactly the same bytes.
    """
    config = run.config
    if not isinstance(config.model, LlamaConfig):
        raise NotImplementedError(f"a step of model.type={config.model.type!r} is not rehearsed")
    blocks, few = config.model.n_layers, 2 * EDGE
    require_even_shares(config.train.batch_size, run.ranks)
    if blocks <= few + 1:
        moments: Mapping[Moment, Bytes] = _rehearsed(run, blocks)
    else:
        fewer, more = _rehearsed(run, few), _rehearsed(run, few + 1)
        moments = {
            moment: {kind: of[kind] + (blocks - few) * (more[moment][kind] - of[kind]) for kind in KINDS}
            for moment, of in fewer.items()
        }
    peak = dict(max(moments.values(), key=lambda of: sum(of.values())))
    peak["optimizer"] -= _saved_by_dtype(run)
    on_gpu = isinstance(config.outer, DilocoConfig) and config.outer.state_device == "cuda"
    return GpuPrediction(
        tensors=peak,
        outer_state=_OUTER_STATE_BYTES * -(-run.needs.params // run.ranks) if on_gpu else 0,
        untracked=CONTEXT_BYTES + (NCCL_BYTES if run.ranks > 1 else 0),
    )


def _rehearsed(run: GpuRun, blocks: int) -> Mapping[Moment, Bytes]:
    shallow = run.with_settings({"model.n_layers": blocks})
    return rehearse(shallow.config, run.needs.vocab_size, ranks=run.ranks, placed=run.placement)


def _saved_by_dtype(run: GpuRun) -> int:
    """Return the bytes on a rank that `optim.state_dtype` saves; its temporaries never make the peak."""
    plain = run.with_settings({"optim.state_dtype": "float32"})
    return (plain.needs.moment_bytes - run.needs.moment_bytes) // run.ranks


def least_bytes(run: GpuRun) -> int:
    """Return a lower bound: without the margin, and compiled, which keeps what `selective` keeps."""
    train = run.config.train
    if train.compile is not False and train.activation_checkpointing == "none":
        run = run.with_settings({"train.activation_checkpointing": "selective"})
    found = predict_gpu(run)
    return found.peak_bytes - found.margin


def knobs(run: GpuRun, room: int) -> Iterator[SettingChange]:
    """Predict the effect of each memory-saving setting, cheapest first, to fit into `room` bytes.

    If no single one suffices, combinations follow: of those that change no result, then of all.
    """
    is_enough, exact, everything = False, dict[str, Any](), dict[str, Any]()
    for choices in _choices(run):
        knob = _first_that_fits(run, choices, room)
        is_enough = is_enough or knob.peak_bytes <= room
        everything |= knob.settings
        exact |= {key: value for key, value in knob.settings.items() if key not in _APPROXIMATE}
        yield knob
    for settings in (exact, everything) if exact != everything else (everything,):
        if not is_enough and len(settings) > 1:
            knob = _turned(run, settings)
            is_enough = knob.peak_bytes <= room
            yield knob


def way_out(run: GpuRun, room: int) -> str:
    """Return the setting that fits a run into `room` bytes, as a user types it; otherwise what comes closest."""
    tried = ""
    for knob in knobs(run, room):
        tried = f"{knob} needs {human_bytes(knob.peak_bytes)}"
        if knob.peak_bytes <= room:
            return f"set {tried}"
    more = "train with more ranks on more GPUs, on larger ones, or a smaller model"
    return f"even {tried}: {more}" if tried else more


def _first_that_fits(run: GpuRun, choices: Sequence[Mapping[str, Any]], room: int) -> SettingChange:
    """Return the first choice that fits, or the last."""
    *others, last = choices
    for settings in others:
        if (knob := _turned(run, settings)).peak_bytes <= room:
            return knob
    return _turned(run, last)


def _turned(run: GpuRun, settings: Mapping[str, Any]) -> SettingChange:
    return SettingChange(settings, predict_gpu(run.with_settings(settings)).peak_bytes)


def _choices(run: GpuRun) -> Iterator[list[dict[str, Any]]]:
    """Return memory-saving settings, grouped by key: the first that fits is taken, or the last."""
    train, outer, placed = run.config.train, run.config.outer, run.placement
    share = train.batch_size // run.ranks
    sizes = [train.micro_bs >> n for n in range(1, train.micro_bs.bit_length())]
    if smaller := [{"train.micro_bs": size} for size in sizes if size < share]:
        yield smaller
    if train.activation_checkpointing == "none":
        yield [{"train.activation_checkpointing": "selective"}]
    if train.activation_checkpointing != "full":
        yield [{"train.activation_checkpointing": "full"}]
    if not placed.reshard_after_forward:
        yield [{"train.reshard_after_forward": True}]
    if not placed.reduces_micro_batches and run.ranks > 1 and share > train.micro_bs:
        yield [{"train.reduce_gradients": "micro_batch"}]
    if isinstance(outer, DilocoConfig) and outer.state_device == "cuda":
        yield [{"outer.state_device": "cpu"}]
    optim = run.config.optim
    if optim.state_dtype != "int8" and not isinstance(outer, CustomConfig | DdpConfig | DemoConfig):
        dtypes = ("bfloat16", "int8") if optim.state_dtype == "float32" and optim.suits_bfloat16 else ("int8",)
        yield [{"optim.state_dtype": dtype} for dtype in dtypes]
