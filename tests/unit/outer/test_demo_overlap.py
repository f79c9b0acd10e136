"""DeMo with payloads that travel while the next step runs: as its oracle says, and when nodes come, go and fail."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.oracles.problem import Problem
from tests.oracles.sparse import demo
from tests.unit.audits import audit_of
from tests.unit.conftest import FakeNode, FakeRun
from tests.unit.outer.test_payload_rounds import LR, memory_of, start_again, start_problem
from torch import Tensor

from zeroband.config.outer import DemoConfig
from zeroband.errors import Fenced
from zeroband.state.digest import digest_of

StartRun = Callable[..., FakeRun]
Noise = Callable[..., Tensor]

STEPS = 20
OVERLAPPED, WAITING = DemoConfig(type="demo", overlap=1), DemoConfig(type="demo")


def go_on(run: FakeRun, noise: Noise, steps: int, *names: str, first: int = 0) -> None:
    """So many steps of these nodes, each with gradients of its own, numbered from `first` on."""
    works = {name: partial(make_steps, run[name], noise, name, first, steps) for name in names or run.nodes}
    run.together(**works)


def make_steps(node: FakeNode, noise: Noise, name: str, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        node.gradient_step(noise(100 * step + ord(name)))


def flush(run: FakeRun, *names: str) -> None:
    run.together(**{name: run[name].outer.flush for name in names or run.nodes})


def train(run: FakeRun, problem: Problem, name: str) -> list[Tensor]:
    node, history = run[name], list[Tensor]()
    while not node.outer.progress.is_complete:
        assert node.dealt_steps == 1
        for report in node.gradient_step(problem.gradient("abcd".index(name), len(history) + 1, node.params)):
            assert len(history) < STEPS - 1 or report.round >= STEPS - 1
        assert len(history) == STEPS - 1 or digest_of(node.params) == node.outer.state_digest
        history.append(node.params)
    return history


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_nodes_of_which_one_drops_are_the_oracle_bit_for_bit(start_run: StartRun, share: float) -> None:
    problem = Problem(4)
    config = DemoConfig(type="demo", overlap=1, k=5, chunk=13, values="float32", decay=0.99, share=share)
    run = start_problem(start_run, problem, config, faults={"c": ["opened@11=SIGKILL"]}, total_steps=STEPS)
    done = run.together(**{name: partial(train, run, problem, name) for name in "abcd"})
    theirs = demo(problem, STEPS, chunk=13, k=5, lr=LR, decay=0.99, share=share, leaves={2: 11}, overlap=1)
    for name in "abd":
        assert all(torch.equal(a, b) for a, b in zip(done[name], theirs, strict=True))
        assert [report.round for report in run[name].reports] == list(range(1, STEPS + 1))
    assert audit_of(run).is_exact


def test_step_does_not_wait_for_its_payload(start_run: StartRun, noise: Noise) -> None:
    run = start_run(OVERLAPPED, "a", "b")
    before = run["a"].params
    go_on(run, noise, 1, "a")  # b has not begun
    assert (run["a"].outer.round, run["a"].outer.inner_step) == (0, 1)
    assert torch.equal(run["a"].params, before)
    go_on(run, noise, 1, "b")
    flush(run)
    without = start_again(run, WAITING, "a", "b")
    go_on(without, noise, 1)
    assert run["a"].outer.state_digest == run["b"].outer.state_digest == without["a"].outer.state_digest


def test_node_joins_between_steps_of_the_others(start_run: StartRun, noise: Noise) -> None:
    """It replays a round, and applies them, at the learning rate that they had for the others, which falls."""
    run = start_run(OVERLAPPED, "a", "b", total_steps=30)
    go_on(run, noise, 3)
    joiner = run.add("c")
    joiner.receive(run["a"])  # of round 2, while round 3 is on its way
    flush(run, "a", "b")

    def step_beside(name: str) -> None:
        run.store.await_ready(4, "c")
        make_steps(run[name], noise, name, 3, 1)

    run.together(c=joiner.join, a=partial(step_beside, "a"), b=partial(step_beside, "b"))
    assert (joiner.outer.round, run["a"].outer.round) == (4, 3) and not memory_of(joiner).any()
    go_on(run, noise, 1, first=4)
    run.together(**{name: partial(finish, run[name], noise, name) for name in run.nodes})
    assert run.store.verdicts[-1].plan.contributors().keys() == {"a", "b", "c"}
    assert len({digest_of(node.params) for node in run.nodes.values()}) == 1
    assert audit_of(run).is_exact


def finish(node: FakeNode, noise: Noise, name: str) -> None:
    step = 5
    while not node.outer.progress.is_complete:
        make_steps(node, noise, name, step, 1)
        step += 1
    assert node.outer.progress.inner_step == 30


def test_nothing_is_on_its_way_at_a_checkpoint(start_run: StartRun, noise: Noise) -> None:
    run = start_run(OVERLAPPED, "a", "b", flush_every=3)
    rounds = list[int]()
    for step in range(7):
        go_on(run, noise, 1, first=step)
        rounds.append(run["a"].outer.round)
        assert run["a"].outer.state_digest == run["b"].outer.state_digest == digest_of(run["b"].params)
    assert rounds == [0, 1, 3, 3, 4, 6, 6]


def test_node_that_leaves_hands_over_its_last_payload(start_run: StartRun, noise: Noise) -> None:
    run = start_run(OVERLAPPED, "a", "b")
    go_on(run, noise, 2)
    run["b"].departure.ask(0.0)
    go_on(run, noise, 1, first=2)
    assert run["b"].reports[-1].weights == (10, 10) and run["b"].outer.round == 3
    flush(run)
    run["b"].member.close()
    assert run["a"].outer.state_digest == run["b"].outer.state_digest
    go_on(run, noise, 3, "a", first=3)
    assert run.store.verdicts[-1].members == ("a",)
    assert audit_of(run).is_exact


def test_payload_of_a_node_that_is_voted_out_goes_back_into_its_memory(start_run: StartRun, noise: Noise) -> None:
    """Both have the same momentum at last, though one of them never got a payload through."""
    run = start_run(OVERLAPPED, "a", "b")
    run["b"].member.close()  # its lease ran out
    go_on(run, noise, 1, "b")
    taken = memory_of(run["b"]).clone()
    outcome: Any = run.together(b=partial(make_steps, run["b"], noise, "b", 1, 1), a=partial(go_alone, run, noise))
    assert isinstance(outcome["b"], Fenced)
    torch.testing.assert_close(memory_of(run["b"]), 0.1 * noise(ord("b")), rtol=0, atol=1e-6)
    assert not torch.allclose(memory_of(run["b"]), taken)


def go_alone(run: FakeRun, noise: Noise) -> None:
    make_steps(run["a"], noise, "a", 0, 2)


def test_node_that_learned_nothing_finite_sends_nothing(start_run: StartRun, noise: Noise) -> None:
    run = start_run(OVERLAPPED, "a", "b")
    go_on(run, noise, 2)
    kept = memory_of(run["b"]).clone()
    works = {"a": partial(make_steps, run["a"], noise, "a", 2, 1)}
    works["b"] = partial(run["b"].gradient_step, noise(1) * float("nan"))  # pyright: ignore[reportArgumentType]
    run.together(**works)
    flush(run)
    verdict = run.store.verdicts[-1]
    assert verdict.plan.weights == (10, 0) and run["a"].outer.state_digest == run["b"].outer.state_digest
    assert torch.equal(memory_of(run["b"]), kept) and run["b"].params.isfinite().all()
    assert audit_of(run).is_exact
