"""What a configuration takes on GPUs, in host memory and in shared memory, against what a machine has; as a table."""

from __future__ import annotations

from collections.abc import Sequence

from zeroband.checks.needs import Needs
from zeroband.config.load import load_config
from zeroband.config.model import LlamaConfig, flops_per_token
from zeroband.config.schema import RunConfig
from zeroband.data.tokenizer import NoTokenizer, tokenizer_of
from zeroband.errors import ConfigError
from zeroband.observe.words import human_bytes

_ANY_STORE = ("--store.url", "redis://localhost")
"""A plan of a run between nodes needs none."""


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
    """Seconds of one inner step of a node, whose GPUs make `flops` FLOP/s each, used in part (`mfu`)."""
    length = config.data.seq_length
    model = config.model
    if not isinstance(model, LlamaConfig):
        raise ConfigError(
            f"a plan of GPUs is for model.type='llama', not {model.type!r}; give --params and --step-s instead"
        )
    each = flops_per_token(model, vocab_size, length)
    return config.train.batch_size * length * each / (gpus * flops * mfu)


def memory_plan(config: RunConfig, vocab_size: int, *, ranks: int, gpu_bytes: int) -> tuple[str, bool]:
    """Predict what a run takes with a GPU of `gpu_bytes` for each of its ranks, as a table, and whether it fits.

    Where it does not, the table says with which settings it does. Raises ConfigError. Loads torch.
    """
    from zeroband.checks.gpu_prediction import GpuRun, knobs, predict_gpu

    run, needs = GpuRun(config, vocab_size, ranks, gpu_bytes), Needs(config, vocab_size)
    found = predict_gpu(run)
    fits, peak = found.peak_bytes <= gpu_bytes, human_bytes(found.peak_bytes)
    lines = [
        f"{needs.params / 1e9:.3g} B parameters on {ranks} x {human_bytes(gpu_bytes)}, predicted:",
        "",
        *_block("each GPU", found.parts),
        *_block("host memory", {**needs.host_parts(ranks), "shared memory": needs.shared_bytes}),
        *_block("shared memory", needs.shared_parts),
        f"{'fits' if fits else 'DOES NOT FIT'}: {peak} of {human_bytes(gpu_bytes)} on each GPU",
    ]
    if not fits:
        lines.append("each of these by itself, and what it needs:")
        for knob in knobs(run, gpu_bytes):
            mark = "fits" if knob.peak_bytes <= gpu_bytes else ""
            lines.append(f"  {human_bytes(knob.peak_bytes):>8}  {mark:<4}  {knob}")
    return "\n".join(lines), fits


def _block(title: str, parts: dict[str, int]) -> list[str]:
    rows = [f"  {purpose:<20}{human_bytes(size):>8}" for purpose, size in parts.items() if size]
    return [f"{title:<22}{human_bytes(sum(parts.values())):>8}", *rows, ""]
