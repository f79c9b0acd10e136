"""Predicts GPU, host and shared memory of a configuration, as a table."""

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
"""Placeholder: a plan needs no store."""


def planned_config(argv: Sequence[str]) -> RunConfig:
    """Load a configuration, with a placeholder store if needed. Raises ConfigError."""
    try:
        return load_config(argv)
    except ConfigError as error:
        try:
            return load_config([*argv, *_ANY_STORE])
        except ConfigError:
            raise error from None


def planned_needs(config: RunConfig) -> Needs:
    """Return the needs of a run, with the vocabulary of the configuration or of the tokenizer.

    Raises ConfigError if the tokenizer cannot be opened.
    """
    try:
        tokenizer = NoTokenizer(room) if (room := config.data.vocab_size) else tokenizer_of(config.data)
        return Needs(config, tokenizer.padded_vocab_size)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"{error}; or give its size, such as --data.vocab-size 128256") from None


def step_seconds(needs: Needs, *, gpus: int, flops: float, mfu: float) -> float:
    """Return the seconds of an inner step on GPUs of `flops` FLOP/s each at this MFU."""
    config, model, length = needs.config, needs.config.model, needs.config.data.seq_length
    if not isinstance(model, LlamaConfig):
        raise ConfigError(
            f"a plan of GPUs needs model.type='llama', not {model.type!r}; give --params and --step-s instead"
        )
    each = flops_per_token(model, needs.vocab_size, length)
    return config.train.batch_size * length * each / (gpus * flops * mfu)


def memory_plan(needs: Needs, *, ranks: int, gpu_bytes: int) -> tuple[str, bool]:
    """Predict memory with a GPU of `gpu_bytes` per rank. Returns a table and whether it fits.

    If it does not, the table lists settings that would. Raises ConfigError. Loads torch.
    """
    from zeroband.checks.gpu_prediction import GpuRun, knobs, predict_gpu

    run = GpuRun(needs, ranks, gpu_bytes)
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
        lines.append("single changes, and what each would need:")
        for knob in knobs(run, gpu_bytes):
            mark = "fits" if knob.peak_bytes <= gpu_bytes else ""
            lines.append(f"  {human_bytes(knob.peak_bytes):>8}  {mark:<4}  {knob}")
    return "\n".join(lines), fits


def _block(title: str, parts: dict[str, int]) -> list[str]:
    rows = [f"  {purpose:<20}{human_bytes(size):>8}" for purpose, size in parts.items() if size]
    return [f"{title:<22}{human_bytes(sum(parts.values())):>8}", *rows, ""]
