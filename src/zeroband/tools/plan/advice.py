"""Chooses a method from forecasts, with reasons. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from zeroband.config.outer import SparseLocoConfig
from zeroband.config.stability import AlgorithmSetting, Caution, cautions, safe_lr
from zeroband.tools.plan.forecast import Forecast, Job

_KNOWN_LOSS = {
    "ddp": "the reference",
    "diloco": "within 0.4 % of data parallel training at 150M over a long run (OpenDiLoCo)",
    "streaming": "as good as DiLoCo from 35M to 4B with an overlap of a few steps (published)",
    "eager": "0.4 % behind at 1B, about 3 % at 35M, with two nodes (published)",
    "sparseloco": "at least as good as DiLoCo at 512M to 72B (published, second-hand)",
    "demo": "as good as AdamW from 300M (DeMo) or 1.2B (DisTrO) on, not below (published)",
}


def cautions_of(forecast: Forecast, job: Job) -> tuple[Caution, ...]:
    """Return the known problems of a forecast's method with these settings."""
    rule = SparseLocoConfig(type="sparseloco")
    is_sparse = forecast.method == "sparseloco"
    setting = AlgorithmSetting(
        method=forecast.method,
        nodes=job.senders if forecast.method == "demo" else job.nodes,  # it sums over what each sender contributes
        params=job.params,
        inner_steps=forecast.round_steps,
        total_steps=job.total_steps,
        lr=safe_lr(forecast.method, job.nodes, job.outer_momentum) if job.outer_lr is None else job.outer_lr,
        momentum=job.outer_momentum,
        overlap=job.overlap,
        density=rule.k / rule.chunk**2 if is_sparse else None,
        decay=rule.decay,
    )
    return cautions(setting)


def advise(found: Sequence[Forecast], job: Job, target: float) -> tuple[Forecast, list[str]]:
    """Choose the method that reaches the target with the fewest cautions, else the closest one, with reasons.

    `found`: the most preferred first.
    """
    stable = [f for f in found if not any(c.is_unstable for c in cautions_of(f, job))] or list(found)
    busy = [f for f in stable if f.compute_utilisation >= target]
    if busy:
        chosen = min(busy, key=lambda f: len(cautions_of(f, job)))
        reasons = [f"computes {100 * chosen.compute_utilisation:.1f} % of the time; the target is {100 * target:g} %"]
    else:
        chosen = max(stable, key=lambda f: f.compute_utilisation)
        reasons = [
            f"no method computes {100 * target:g} % of the time; this one comes closest with "
            f"{100 * chosen.compute_utilisation:.1f} %",
            *_ways_out(stable, target),
        ]
    reasons.append(_KNOWN_LOSS[chosen.method])
    if chosen.method in ("diloco", "streaming", "eager") and job.outer_lr is None:
        lr = safe_lr(chosen.method, job.nodes, job.outer_momentum)
        reasons.append(f"set outer.optimizer.lr = {lr:g} with momentum {job.outer_momentum:g}")
    return chosen, reasons


def _ways_out(found: Sequence[Forecast], target: float) -> list[str]:
    """Return the inner steps with which methods with rounds would reach the target."""
    ways: list[str] = []
    for method in ("diloco", "eager"):
        of = [f for f in found if f.method == method]
        if of:
            least = min(of, key=lambda f: f.transfer_s)
            hidden, idle = float(method == "eager"), 1 / target - 1
            all_s = least.transfer_s + least.beside_s + least.own_s
            steps = math.ceil(max(all_s / (hidden + idle), least.own_s / idle) / least.step_s)
            ways.append(f"{method} with {least.codec} would with {steps} inner steps")
    return ways
