"""Missing features that make a run slower: logged once at the start, and reported by `doctor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from zeroband.checks.finding import Finding
from zeroband.config.model import LlamaConfig
from zeroband.config.outer import DemoConfig, DilocoConfig
from zeroband.config.schema import RunConfig

if TYPE_CHECKING:
    import torch


def slow_fallbacks(config: RunConfig, device: torch.device) -> Iterator[Finding]:
    """Return a finding for each, with reason and cost. On a CPU only for what was asked for. Loads torch."""
    from zeroband.node.float8 import float8_problem

    if device.type == "cuda":
        yield from _on_gpu(config, device)
    if config.train.float8 is not None and (why := float8_problem(device)):
        yield Finding("train.float8", f"off, {why}", "multiplies in bfloat16, which is up to a quarter slower")


def _on_gpu(config: RunConfig, device: torch.device) -> Iterator[Finding]:
    import torch

    from zeroband.kernels.probe import triton_problem
    from zeroband.model.attention import attention_on

    why = ""
    if isinstance(config.model, LlamaConfig):
        _, why = attention_on(device, getattr(torch, config.train.dtype), config.model)
    if why and config.data.document_mask:
        yield Finding(
            "attention over packed documents", f"masked, {why}", "slower: bench/train_loop.py says by how much"
        )
    if not (why := triton_problem(device)):
        return
    way_out = "install triton and a C compiler with Python's headers (Debian: build-essential, python3-dev)"
    if config.train.compile is not False:
        yield Finding("torch.compile", f"off, {why}", f"costs about 15 % of the speed, and memory; {way_out}")
    if isinstance(config.outer, DemoConfig) or (
        isinstance(config.outer, DilocoConfig) and config.outer.state_device == "cuda"
    ):
        yield Finding(
            "outer kernels", f"in plain torch, {why}", f"slower: bench/kernels.py says by how much; {way_out}"
        )
