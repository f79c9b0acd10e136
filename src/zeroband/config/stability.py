"""Settings of an outer algorithm that are known to be unstable or not to work: rules on plain numbers. Pure; no torch.

Each rule yields a warning with the value, the reason and a fix. Limits are derived here, published or measured, as each
says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from zeroband.config.outer import (
    CustomConfig,
    DdpConfig,
    DemoConfig,
    DilocoConfig,
    Outer,
    RoundsConfig,
    SparseLocoConfig,
)
from zeroband.config.schema import RunConfig

Method = Literal["ddp", "diloco", "streaming", "eager", "delayed", "demo", "sparseloco"]

_TOLERANCE = 1e-4


@dataclass(frozen=True)
class AlgorithmSetting:
    """Input of the rules; None: unknown, and no rule applies."""

    method: Method
    nodes: int
    params: float | None = None
    inner_steps: int | None = None
    """H."""
    total_steps: int | None = None
    """Inner steps of the run."""
    lr: float = 0.7
    """Outer learning rate."""
    momentum: float = 0.9
    """Outer momentum."""
    overlap: int = 0
    """Inner steps of a fragment's transfer."""
    alpha: float = 0.5
    """Fraction of the inner parameters that a late mean leaves."""
    density: float | None = None
    """Fraction of the values that is sent."""
    decay: float = 0.95
    """Decay of the error buffer."""

    @property
    def rounds(self) -> int | None:
        if self.total_steps is None or self.inner_steps is None:
            return None
        return self.total_steps // self.inner_steps


@dataclass(frozen=True)
class Caution:
    """A warning about one setting."""

    key: str
    """Configuration key."""
    why: str
    """The value and the reason."""
    way_out: str
    is_unstable: bool
    """Whether the run is expected to diverge, not only to lose quality."""

    def __str__(self) -> str:
        return f"{self.key}: {self.why}; {self.way_out}"


def largest_stable_lr(method: Method, nodes: int, momentum: float) -> float:
    """Return the largest stable outer learning rate for a direction that converges within every round: derived here.

    In such a direction a node's pseudo-gradient is its distance from the optimum. The outer SGD with Nesterov momentum
    mu and an outer gradient a d(r) + b d(r - 1) then has the characteristic polynomial
        z (z - 1) (z - mu) + lr ((1 + mu) z - mu) (a z + b),
    a = 1, b = 0 for synchronous updates, a = 0, b = 1 for naively delayed ones, a = 1 / M, b = 1 - 1 / M for the common
    part of nodes of equal weight under eager ones. Their differences are stable up to M times the synchronous limit, so
    those never decide.
    """
    low, high = 0.0, 4.0
    while high - low > _TOLERANCE:
        lr = (low + high) / 2
        is_stable = _has_roots_inside(_polynomial(method, nodes, momentum, lr))
        low, high = (lr, high) if is_stable else (low, lr)
    return low


def _polynomial(method: Method, nodes: int, mu: float, lr: float) -> list[float]:
    """Return the characteristic polynomial, highest power first."""
    a = {"delayed": 0.0, "eager": 1 / nodes}.get(method, 1.0)
    b = 1.0 - a
    return [1.0, lr * (1 + mu) * a - (1 + mu), mu + lr * ((1 + mu) * b - mu * a), -lr * mu * b]


def _has_roots_inside(polynomial: list[float]) -> bool:
    """Whether all roots lie inside the unit circle (Schur and Cohn)."""
    while len(polynomial) > 1:
        first, last = polynomial[0], polynomial[-1]
        if abs(last) >= abs(first):
            return False
        pairs = zip(polynomial, reversed(polynomial), strict=True)
        polynomial = [first * c - last * r for c, r in pairs][:-1]
    return True


def safe_lr(method: Method, nodes: int, momentum: float) -> float:
    """Return a safe outer learning rate: half of the limit for eager and delayed updates, else as published."""
    if method in ("eager", "delayed"):
        return round(largest_stable_lr(method, nodes, momentum) / 2, 2)
    if method == "sparseloco":
        return 1.0
    return 0.4 if method == "streaming" else 0.7


def cautions(setting: AlgorithmSetting) -> tuple[Caution, ...]:
    """Return the warnings about these settings, the worst first."""
    found = [caution for rule in _RULES for caution in rule(setting)]
    return tuple(sorted(found, key=lambda caution: not caution.is_unstable))


def _outer_lr(setting: AlgorithmSetting) -> Iterator[Caution]:
    if setting.method in ("ddp", "demo"):
        return
    momentum = 0.0 if setting.method == "sparseloco" else setting.momentum
    limit, safe = (f(setting.method, setting.nodes, momentum) for f in (largest_stable_lr, safe_lr))
    seen = f"{setting.lr:g} with momentum {momentum:g} and {setting.nodes} nodes"
    if setting.lr > limit:
        why = f"{seen} is above {limit:.2f}, where directions that converge within a round begin to grow (derived)"
        yield Caution("outer.optimizer.lr", why, f"set it to {safe:g} or below", is_unstable=True)
    elif setting.method in ("eager", "delayed") and setting.lr > 0.75 * limit:
        why = f"{seen} is within a quarter of the limit of stability {limit:.2f} (derived)"
        yield Caution("outer.optimizer.lr", why, f"set it to {safe:g}, half of the limit", is_unstable=False)


def _rounds(setting: AlgorithmSetting) -> Iterator[Caution]:
    if setting.method in ("ddp", "demo"):
        return
    if setting.inner_steps is not None and setting.inner_steps > 1000:
        why = f"{setting.inner_steps} was never tried; from 50 to 1000 steps DiLoCo loses about 3 % (published)"
        yield Caution("outer.inner_steps", why, "set it to 500 or below", is_unstable=False)
    if setting.rounds is None:
        return
    if setting.method == "sparseloco" and setting.rounds < 200:
        why = f"{setting.rounds} rounds are too few to drain the error buffers, which takes about 200 (measured)"
        yield Caution(
            "outer.inner_steps", why, "make rounds shorter, or send more values of each chunk", is_unstable=False
        )
    gain = setting.lr / (1 - setting.momentum)
    if setting.method != "sparseloco" and setting.rounds < 10 * gain:
        why = f"{setting.rounds} rounds are few for an outer gain lr / (1 - momentum) of {gain:.3g} (measured)"
        yield Caution("outer.optimizer.momentum", why, "use lr 1 and momentum 0, or shorter rounds", is_unstable=False)


def _size(setting: AlgorithmSetting) -> Iterator[Caution]:
    if setting.params is None:
        return
    seen = f"{setting.params:.3g} parameters"
    if setting.method == "demo" and setting.params < 1.2e9:
        known = (
            "DisTrO's authors saw 50M and 300M converge less well"
            if setting.params < 3e8
            else ("DeMo's authors saw no loss at 300M, DisTrO's did below 1.2B")
        )
        yield Caution("outer.type", f"{seen}: {known} (published)", "use diloco, or expect a gap", is_unstable=False)
    if setting.method in ("eager", "delayed") and setting.params < 1e8:
        why = f"{seen}: eager updates lose about 3 % at 35M and 0.4 % at 1B (published)"
        yield Caution("outer.type", why, "use streaming with an overlap of a few steps", is_unstable=False)
    if setting.method in ("diloco", "streaming") and setting.nodes >= 8 and setting.params <= 1e8:
        why = f"{seen} on {setting.nodes} nodes: DiLoCo loses about 4 % at 35M with 8 of them (published)"
        yield Caution("outer.type", why, "use fewer nodes, shorter rounds or ddp", is_unstable=False)


def _overlap(setting: AlgorithmSetting) -> Iterator[Caution]:
    if setting.method == "streaming":
        if setting.overlap > 10:
            why = f"{setting.overlap} steps; up to 5 are recommended, up to 10 cost less than 0.2 % (published)"
            yield Caution("outer.overlap", why, "set it to 5 or below, or use eager updates", is_unstable=False)
        if setting.alpha == 1 and setting.nodes > 1:
            why = "1 keeps each node's own parameters: the nodes never come together"
            yield Caution("outer.alpha", why, "set it to 0.5", is_unstable=True)
    if setting.method == "eager" and setting.nodes > 2:
        why = f"{setting.nodes} nodes; the paper has two"
        yield Caution("elastic.start_nodes", why, "compare with streaming at small scale first", is_unstable=False)
    if setting.method == "delayed":
        why = "naively delayed updates lost 12 % where eager ones lost 1 % (published)"
        yield Caution("outer.type", why, "use eager updates; this one is a baseline", is_unstable=False)


def _sparse(setting: AlgorithmSetting) -> Iterator[Caution]:
    if setting.method == "demo" and setting.nodes > 32:
        why = f"every node downloads {setting.nodes - 1} payloads a step"
        yield Caution("elastic.start_nodes", why, "use an aggregator", is_unstable=False)
    if setting.method == "sparseloco":
        if setting.density is not None and not 0.005 <= setting.density <= 0.12:
            why = f"{100 * setting.density:.3g} % of the values; tried: 1 to 3 % at 178M to 72B, to 12 % below"
            yield Caution("outer.k", why, "send 1 to 3 %", is_unstable=False)
        if setting.decay == 0:
            why = "0 forgets what was not sent: top-k without error feedback is clearly worse than few bits (published)"
            yield Caution("outer.decay", why, "set it to 0.95", is_unstable=True)


_RULES: tuple[Callable[[AlgorithmSetting], Iterator[Caution]], ...] = (_outer_lr, _rounds, _size, _overlap, _sparse)


# -- the rules' input, from a configuration --------------------------------------------------------------------------


def method_of(outer: Outer) -> Method | None:
    """Return the method of an [outer] section; None if no rule knows it."""
    match outer:
        case DdpConfig() | DemoConfig() | SparseLocoConfig():
            return outer.type
        case CustomConfig():
            return None
        case DilocoConfig(merge="eager") if outer.overlap:
            return "eager"
        case DilocoConfig(fragments=1, overlap_steps=None):
            return "delayed"
        case DilocoConfig():
            return "streaming" if outer.overlap or outer.fragments > 1 else "diloco"


def overlap_steps(outer: Outer | None) -> int:
    """Return the inner steps that may overlap a transfer; 0 for a whole phase that ends by time."""
    match outer:
        case RoundsConfig(overlap="full"):
            return (outer.round_steps or 0) // outer.fragments
        case RoundsConfig() | DemoConfig():
            return int(outer.overlap)
        case _:
            return 0


def setting_of(config: RunConfig, *, params: float | None) -> AlgorithmSetting | None:
    """Return the input of the rules; None for a node that trains alone. `params`: of the model, if known."""
    outer = config.outer
    if outer is None or (method := method_of(outer)) is None:
        return None
    setting = AlgorithmSetting(
        method=method,
        nodes=config.elastic.start_nodes,
        params=params,
        inner_steps=outer.round_steps,
        total_steps=config.train.total_steps,
        overlap=overlap_steps(outer),
    )
    match outer:
        case DilocoConfig(optimizer=optimizer, alpha=alpha):
            return replace(setting, lr=optimizer.lr, momentum=optimizer.momentum, alpha=alpha)
        case SparseLocoConfig():
            return replace(setting, lr=outer.lr, density=outer.k / outer.chunk**2, decay=outer.decay)
        case _:
            return setting


def cautions_of(config: RunConfig, *, params: float | None = None) -> tuple[Caution, ...]:
    """Return the warnings about a run, the worst first, for the nodes that it waits for at its start."""
    setting = setting_of(config, params=params)
    return () if setting is None else cautions(setting)
