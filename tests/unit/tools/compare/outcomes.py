"""Outcomes as a comparison would find them, made up."""

from __future__ import annotations

from zeroband.tools.compare.results import Point, RunMeasurements, RunResult

PARAMS = 1000


def counted(*, nodes: int = 4, rounds: int = 10, sent: float = 6000.0, step_s: float = 0.1) -> RunMeasurements:
    """The counters of 100 steps of 50 tokens a node."""
    return RunMeasurements(
        nodes=nodes,
        steps=100,
        tokens=nodes * 100 * 50,
        step_s=step_s,
        blocked_s=8.0,
        wall_s=20.0,
        rounds=rounds,
        sent_bytes=sent,
        received_bytes=sent,
        peak_bytes=sent / rounds if rounds else 0.0,
        apply_s=1.0,
    )


def outcome(
    arm: str, lr: float, loss: float | None, *, seed: int = 0, found: RunMeasurements | None = None
) -> RunResult:
    """A run that ended."""
    points = (Point(50, None if loss is None else loss + 0.5), Point(100, loss))
    digest, counters = f"{arm}/{lr}/{seed}", found or counted()
    return RunResult(arm, lr, seed, digest, PARAMS, points, tuning_loss=loss, measured=counters, took_s=12.0)


def failed(arm: str, lr: float, why: str = "node1 ended with 1: boom\nmore") -> RunResult:
    """A run that did not."""
    return RunResult(arm, lr, 0, f"{arm}/{lr}", failure=why, took_s=3.0)
