"""Recommends phase, fragments, overlap, grace and codec for measured links, each with a reason. Pure.

Candidates are ordered by the least known loss: blocking rounds, fragments that overlap a few steps, both again in
four bits, a whole phase of overlap. For each, the shortest phase that reaches the target is found. The first candidate
with a short phase is recommended, else the first with a phase that published runs have tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from zeroband.config.stability import safe_lr
from zeroband.errors import ConfigError
from zeroband.observe.status import human_bytes
from zeroband.tools.plan.forecast import Forecast, Job, Link, Method, forecast_of

SHORT_STEPS, MOST_STEPS = 100, 500
"""Inner steps per phase: usual in published runs, and their maximum (OpenDiLoCo, arXiv:2407.07852)."""
LEAST_STEPS = 10
_CODECS = ("int8", "int4")
_OVERLAP_STEPS = 5
"""Inner steps that a fragment may travel; this overlap cost nothing in Streaming DiLoCo (arXiv:2501.18512)."""
_FRAGMENTS = 4
_GRACE = 0.1
_SAME_PACE = 1.05
"""Factor between step times below which nodes count as equally fast."""


@dataclass(frozen=True)
class RecommendedKey:
    """A configuration key, its value as TOML, and the reason."""

    key: str
    value: str
    why: str


@dataclass(frozen=True)
class Recommendation:
    """Recommended settings and their forecast."""

    settings: Sequence[RecommendedKey]
    forecast: Forecast
    reaches_target: bool

    def to_toml(self) -> str:
        """Return the settings as a configuration file with reasons as comments."""
        lines = list[str]()
        for section in dict.fromkeys(setting.key.rpartition(".")[0] for setting in self.settings):
            lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
            for setting in self.settings:
                of, _, name = setting.key.rpartition(".")
                if of == section:
                    lines += [f"# {setting.why}", f"{name} = {setting.value}"]
        return "\n".join(lines)


@dataclass(frozen=True)
class _Rung:
    """A candidate: method, codec, fragments and overlap."""

    method: Method
    codec: str
    fragments: int = 1
    overlap: int = 0

    def forecast(self, job: Job, link: Link, steps: int) -> Forecast:
        job = replace(job, inner_steps=steps, fragments=self.fragments, overlap=self.overlap)
        return forecast_of(job, link, self.method, self.codec)

    def shortest(self, job: Job, link: Link, target: float) -> Forecast | None:
        """Return the forecast of the shortest phase that reaches the target, by binary search; None if none does."""
        least = max(-(-LEAST_STEPS // self.fragments), self.overlap + 1)
        low, high = least, MOST_STEPS // self.fragments
        if self.forecast(job, link, high * self.fragments).compute_utilisation < target:
            return None
        while low < high:
            middle = (low + high) // 2
            enough = self.forecast(job, link, middle * self.fragments).compute_utilisation >= target
            low, high = (low, middle) if enough else (middle + 1, high)
        return self.forecast(job, link, low * self.fragments)


def _ladder(*, by_time: bool) -> Iterator[_Rung]:
    """Yield the candidates, the most preferred first. `by_time`: phases end by time, which excludes fragments."""
    for codec in _CODECS:
        yield _Rung("diloco", codec)
        if not by_time:
            yield _Rung("streaming", codec, _FRAGMENTS, _OVERLAP_STEPS)
    for codec in _CODECS:
        yield _Rung("eager", codec)


def recommend(job: Job, link: Link, target: float) -> Recommendation:
    """Recommend settings with which nodes compute the target fraction of the time. Raises ConfigError for one node."""
    if job.nodes == 1:
        raise ConfigError("--recommend: one node has no rounds with others; give --nodes 2 or more")
    by_time = (job.slowest_step_s or job.step_s) > _SAME_PACE * job.step_s
    if by_time:  # each node makes as many steps as fit, so that fast nodes do not wait
        job = replace(job, slowest_step_s=None)
    found = [(rung, forecast) for rung in _ladder(by_time=by_time) if (forecast := rung.shortest(job, link, target))]
    short = [each for each in found if each[1].round_steps <= SHORT_STEPS and each[0].method != "eager"]
    if found:
        rung, forecast = (short or found)[0]
    else:
        each = [(rung, rung.forecast(job, link, MOST_STEPS)) for rung in _ladder(by_time=by_time)]
        rung, forecast = max(each, key=lambda pair: pair[1].compute_utilisation)
    settings = [
        RecommendedKey("outer.type", '"diloco"', "Inner AdamW on each node, one outer step per phase."),
        _phase(job, forecast, target, by_time=by_time, is_enough=bool(found)),
        *_travel(rung, forecast),
        _grace(job, by_time=by_time),
        _outer_lr(rung, job),
        _codec(rung, forecast),
    ]
    return Recommendation(settings, forecast, bool(found))


def _phase(job: Job, forecast: Forecast, target: float, *, by_time: bool, is_enough: bool) -> RecommendedKey:
    steps, part = forecast.round_steps, f"{100 * forecast.compute_utilisation:.1f} %"
    why = (
        f"Phase: {steps} inner steps, the shortest with which nodes compute {100 * target:g} % of the time ({part})."
        if is_enough
        else f"Phase: the longest that published runs have tried; nodes compute {part} instead of {100 * target:g} %: "
        f"the links would have to be {forecast.faster_link(target):.3g} times as fast."
    )
    if not by_time:
        return RecommendedKey("outer.inner_steps", str(steps), why)
    seconds = f"{steps * job.step_s:.3g}"
    return RecommendedKey(
        "outer.inner_seconds", seconds, f"{why} By time: slower nodes make fewer steps, so no node waits."
    )


def _travel(rung: _Rung, forecast: Forecast) -> Iterator[RecommendedKey]:
    moves = f"{forecast.transfer_s:,.0f} s of transfer in a phase of {forecast.round_steps * forecast.step_s:,.0f} s"
    if rung.method == "streaming":
        whole = f"{human_bytes(forecast.peak_bytes)} at a time"
        yield RecommendedKey("outer.fragments", str(rung.fragments), f"Fragments: the link carries {whole}.")
        why = f"Overlap: {moves} would block; up to {_OVERLAP_STEPS} steps cost no loss in published runs."
        yield RecommendedKey("outer.overlap", str(rung.overlap), why)
        yield RecommendedKey("outer.merge", '"mix"', "Merge: keeps part of a node's progress during the overlap.")
    elif rung.method == "eager":
        yield RecommendedKey("outer.fragments", "1", "Fragments: one; the model has a whole phase to travel.")
        yield RecommendedKey("outer.overlap", '"full"', f"Overlap: {moves} are more than a few steps can hide.")
        yield RecommendedKey(
            "outer.merge", '"eager"', "Merge: a node's own share applies at once, the others' a phase later."
        )
    else:
        yield RecommendedKey("outer.fragments", "1", "Fragments: one; training waits for the whole round anyway.")
        yield RecommendedKey("outer.overlap", "0", f"Overlap: none; {moves} are within the target.")


def _grace(job: Job, *, by_time: bool) -> RecommendedKey:
    paces = "phases by time even out the nodes' paces" if by_time else "nodes are equally fast"
    why = f"Grace: {paces}; a node late by a tenth of a round is faulty and counts in a later one."
    return RecommendedKey("outer.straggler_grace", f"{_GRACE:g}", why)


def _outer_lr(rung: _Rung, job: Job) -> RecommendedKey:
    lr = safe_lr(rung.method, job.nodes, job.outer_momentum)
    why = f"Outer learning rate: safe for {job.nodes} nodes with momentum {job.outer_momentum:g}."
    return RecommendedKey("outer.optimizer.lr", f"{lr:g}", why)


def _codec(rung: _Rung, forecast: Forecast) -> RecommendedKey:
    sent = f"a node sends {human_bytes(forecast.sent_bytes)} per phase"
    why = (
        f"Codec: {sent}; no loss by int8 pseudo-gradients is known."
        if rung.codec == "int8"
        else f"Codec: {sent}; int8 would need a longer phase or a faster link."
    )
    return RecommendedKey("comm.codec", f'"{rung.codec}"', why)
