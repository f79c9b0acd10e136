"""What a configuration takes on GPUs, in host memory and in shared memory, against what a machine has; as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zeroband.checks.finding import size_text
from zeroband.checks.needs import Needs
from zeroband.config.load import load_config
from zeroband.config.model import LlamaConfig
from zeroband.config.model_size import flops_per_token
from zeroband.config.schema import RunConfig
from zeroband.data.tokenizer import NoTokenizer, tokenizer_of
from zeroband.errors import ConfigError

_ANY_STORE = ("--store.url", "redis://localhost")
"""A plan of a run between nodes needs none."""


@dataclass(frozen=True)
class Gpus:
    """The GPUs of one node, one for each rank."""

    count: int
    memory_bytes: int


def planned_config(argv: Sequence[str]) -> RunConfig:
    """The configuration of a run that is only planned. Raises ConfigError."""
    try:
        return load_config(argv)
    except ConfigError as error:
        try:
            return load_config([*argv, *_ANY_STORE])
        except ConfigError:
            raise error from None


def vocabulary_of(config: RunConfig) -> int:
    """Ids that the model has: as the configuration says, else those of the tokenizer.

    Raises: ConfigError where the tokenizer cannot be opened here.
    """
    try:
        tokenizer = NoTokenizer(room) if (room := config.data.vocab_size) else tokenizer_of(config.data)
        return tokenizer.padded_vocab_size
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{error}; or say how many ids it has, such as --data.vocab-size 128256") from None


def step_seconds(config: RunConfig, vocab_size: int, *, gpus: int, flops: float, mfu: float) -> float:
    """Seconds of one inner step of a node, whose GPUs make so many FLOP/s, at this part of them."""
    length = config.data.seq_length
    model = config.model
    if not isinstance(model, LlamaConfig):
        raise ConfigError(
            f"a plan of GPUs is for model.type='llama', not {model.type!r}; give --params and --step-s instead"
        )
    each = flops_per_token(model, vocab_size, length)
    return config.train.batch_size * length * each / (gpus * flops * mfu)


@dataclass(frozen=True)
class MemoryPlan:
    """What a run takes on a machine."""

    text: str
    params: int
    fits: bool
    """Into the GPUs."""


def memory_plan(config: RunConfig, vocab_size: int, gpus: Gpus) -> MemoryPlan:
    """Predict what a run takes, and with which settings it fits where it does not. Raises ConfigError. Loads torch."""
    from zeroband.checks.gpu_prediction import GpuRun, knobs, predict_gpu

    ranks, room = gpus.count, gpus.memory_bytes
    run, needs = GpuRun(config, vocab_size, ranks, room), Needs(config, vocab_size)
    found = predict_gpu(run)
    fits = found.peak_bytes <= room
    lines = [
        f"{needs.params / 1e9:.3g} B parameters on {ranks} x {size_text(room)}, predicted:",
        "",
        *_block("each GPU", found.parts),
        *_block("host memory", {**needs.host_parts(ranks), "shared memory": needs.shared_bytes}),
        *_block("shared memory", needs.shared_parts),
        f"{'fits' if fits else 'DOES NOT FIT'}: {size_text(found.peak_bytes)} of {size_text(room)} on each GPU",
    ]
    if not fits:
        lines.append("each of these by itself, and what it needs:")
        for knob in knobs(run, room):
            mark = "fits" if knob.peak_bytes <= room else ""
            lines.append(f"  {size_text(knob.peak_bytes):>8}  {mark:<4}  {knob}")
    return MemoryPlan("\n".join(lines), needs.params, fits)


def _block(title: str, parts: dict[str, int]) -> list[str]:
    rows = [f"  {purpose:<20}{size_text(size):>8}" for purpose, size in parts.items() if size]
    return [f"{title:<22}{size_text(sum(parts.values())):>8}", *rows, ""]
