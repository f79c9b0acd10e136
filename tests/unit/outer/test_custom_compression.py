"""A compression of one's own, the one of examples/top_k.py: sent, kept back, given back, refused, replayed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles.problem import ProblemModel
from tests.unit.audits import audit_of
from tests.unit.outer.test_overlap import assert_one_outer_state, go_on
from torch import Tensor

from zeroband.config.outer import CustomConfig
from zeroband.outer.custom import load_algorithm
from zeroband.outer.custom_compression import UNSENT
from zeroband.state.digest import digest_of

TOP_K = Path(__file__).resolve().parents[3] / "examples" / "top_k.py"
PART = 0.2
SENT = 5  # of 22 parameters
StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]


def top_k(*settings: str, **more: Any) -> CustomConfig:
    settings = settings or (f"part={PART}", "lr=0.5")
    return CustomConfig(type="custom", algorithm=str(TOP_K), settings=settings, **{"inner_steps": 1, **more})


class Node:
    """What a node keeps back and sends, written out."""

    def __init__(self) -> None:
        self.unsent = torch.zeros(22)

    def send(self, delta: Tensor) -> Tensor:
        self.unsent = self.unsent + delta
        places = sorted(sorted(range(22), key=lambda place: -abs(float(self.unsent[place])))[:SENT])
        sent = torch.zeros(22)
        sent[places] = self.unsent[places]
        self.unsent = self.unsent - sent
        return sent


def test_rounds_are_those_of_the_formula(start_run: StartRun, noise: Noise) -> None:
    run, written = start_run(top_k(), "a", "b"), {"a": Node(), "b": Node()}
    theta = run["a"].params.clone()
    for round in range(8):
        updates = {"a": noise(round), "b": noise(100 + round)}
        reports = run.round(**updates)
        mean = torch.zeros(22)
        for name, node in written.items():
            mean = mean + node.send(theta - (theta + updates[name])) * 0.5
        theta = theta - mean * 0.5
        assert {report.state_digest for report in reports.values()} == {digest_of(theta)}
        assert {report.payload_bytes for report in reports.values()} == {8 * SENT}
        for name, node in written.items():
            assert torch.equal(run[name].buffers[UNSENT], node.unsent)


def test_all_of_the_values_are_plain_averaging(start_run: StartRun, noise: Noise) -> None:
    run = start_run(top_k("part=1", "lr=1"), "a")
    before = run["a"].params.clone()
    run.round(a=noise(1))
    assert torch.equal(run["a"].params, before - (before - (before + noise(1))))
    assert not run["a"].buffers[UNSENT].any()


def test_what_is_kept_back_is_saved_with_the_node(start_run: StartRun) -> None:
    run = start_run(top_k(), "a")
    assert (run["a"].outer.sections, run["a"].outer.local_sections) == (("params",), (UNSENT,))


def test_round_that_loses_a_member_sends_the_same_payloads_again(start_run: StartRun, noise: Noise) -> None:
    run = start_run(top_k(), "a", "b", "c", inject={"c": ["reduced@1=SIGKILL"]})
    theta, written = run["a"].params.clone(), {"a": Node(), "b": Node()}
    reports = run.round(a=noise(1), b=noise(2), c=noise(3))
    sent = [node.send(theta - (theta + noise(seed))) for seed, node in enumerate(written.values(), 1)]
    expected = theta - (torch.zeros(22) + sent[0] * 0.5 + sent[1] * 0.5) * 0.5
    assert {report.retries for report in reports.values()} == {1}
    for name, node in written.items():
        assert torch.equal(run[name].params, expected) and torch.equal(run[name].buffers[UNSENT], node.unsent)


def test_payload_of_a_node_that_was_away_goes_back(start_run: StartRun, noise: Noise) -> None:
    run = start_run(top_k(), "a", "b")
    before = run["b"].params.clone()
    run["b"].member.close()
    run.round(a=noise(1))
    run.together(b=lambda: run["b"].take_step(noise(2), 10))
    assert torch.equal(run["b"].buffers[UNSENT], before - (before + noise(2)))


def places(*of: int) -> Callable[[Tensor], None]:
    """Writes other places into a payload."""

    def forge(payload: Tensor) -> None:
        payload[: 4 * SENT] = torch.tensor(of, dtype=torch.int32).view(torch.uint8)

    return forge


def spoil(payload: Tensor) -> None:
    payload[4 * SENT :] = torch.full((SENT,), float("nan")).view(torch.uint8)


@pytest.mark.parametrize(
    ("forge", "why"),
    [
        (places(0, 1, 2, 3, 22), "index 22 is out of bounds"),
        (places(-1, 0, 1, 2, 3), "index -1 is out of bounds"),
        (places(0, 1, 1, 2, 3), "places that do not ascend"),
        (spoil, "a value that is not finite"),
    ],
)
def test_payload_that_is_none_is_left_out_by_all(
    start_run: StartRun, noise: Noise, forge: Callable[[Tensor], None], why: str
) -> None:
    run = start_run(top_k(), "a", "b")
    before, own = run["a"].params.clone(), Node()
    run["b"].lanes.forge[0] = forge
    reports = run.round(a=noise(1), b=noise(2))
    for report in reports.values():
        ((refused, reason),) = report.refused
        assert refused == "b" and why in reason
    assert torch.equal(run["a"].params, before - own.send(before - (before + noise(1))) * 0.5)
    assert torch.equal(run["a"].params, run["b"].params)


def test_joiner_replays_the_rounds_that_it_missed(start_run: StartRun, noise: Noise) -> None:
    run = start_run(top_k(), "a", "b")
    run.add("c").receive(run["a"])
    for seed in range(3):
        run.round(a=noise(seed), b=noise(10 + seed))
    assert run.catch_up("c") == run["a"].outer.state_digest
    reports = run.round_with_joiner("c", a=noise(5), b=noise(6))
    assert len({report.state_digest for report in reports.values()}) == 1


@pytest.mark.parametrize("schedule", [{}, {"fragments": 2}, {"overlap": "full"}, {"fragments": 2, "overlap": "full"}])
def test_late_node_loses_nothing_and_counts_once(start_run: StartRun, schedule: dict[str, Any]) -> None:
    config = top_k(inner_steps=4, **schedule)
    total = 8 * config.phase_steps
    run = start_run(config, "a", "b", "c", model=ProblemModel, total_steps=total, quorum=0.6)
    with run.hurry():
        go_on(run, 3 * config.phase_steps, "a", "b", nodes=3)
    go_on(run, total, nodes=3)
    assert_one_outer_state(run)
    assert any("c" in verdict.plan.late for verdict in run.store.verdicts)
    assert any("c" in verdict.plan.contributors() for verdict in run.store.verdicts)
    assert audit_of(run).is_exact


def test_part_that_is_none_is_refused() -> None:
    with pytest.raises(Exception, match="part: Input should be greater than 0"):
        load_algorithm(top_k("part=0"))
