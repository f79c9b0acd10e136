"""A real node joins in the middle of a phase: it trains at once, counts from its first contribution, may be killed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.faults.arena import STEADY, Arena, open_arena

from zeroband.observe.view import node_id_of_member

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(400)]

PHASE_STEPS, STEP_S = 50, 0.2
LONG_PHASES = ("--outer.inner-steps", str(PHASE_STEPS), "--fault.inject", f"inner@+0=TAKES{STEP_S}")
NODE = "newcomer"


@pytest.fixture(scope="module")
def arena(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    with open_arena(tmp_path_factory.mktemp("joining"), "--outer.inner-steps", "20") as arena:
        yield arena


def weights_of(arena: Arena, node_id: str) -> list[int]:
    """What a node weighed in the rounds that it was in."""
    plans = [verdict.plan for _, verdict in sorted(arena.history.items()) if verdict.round]
    told = [(node_id_of_member(m), w) for o in plans for m, w in zip(o.members, o.weights, strict=True)]
    return [weight for member, weight in told if member == node_id]


@pytest.fixture
def arena_of_long_phases(tmp_path: Path) -> Iterator[Arena]:
    with open_arena(tmp_path, *LONG_PHASES) as arena:
        yield arena


def test_joiner_trains_before_a_round_has_heard_of_it_and_counts_in_full(arena_of_long_phases: Arena) -> None:
    arena = arena_of_long_phases
    arena.until_rounds(1)
    node = arena.start(NODE)
    arena.until_contributing(*STEADY, NODE)
    arena.until_rounds(1)
    kinds = [event["kind"] for event in node.events()]
    assert kinds.index("recovered") < kinds.index("joined") < kinds.index("first_step")
    assert kinds.index("first_step") < kinds.index("round_committed"), "it waited for a round"
    (first,) = node.events("first_step")
    rounds = [event["round"] for event in node.events("round_committed")]
    phases = f"phases of {PHASE_STEPS * STEP_S:g} s"
    sys.stdout.write(f"first inner step {first['after_s']} s after its state was verified, {phases}\n")
    assert weights_of(arena, NODE) and all(weights_of(arena, NODE)) and rounds[0] in arena.history
    arena.check()


@pytest.mark.parametrize("moment", ["joining@0", "inner@+0", "waiting@+0", "opened@+0", "voted@+0"])
def test_joiner_that_is_killed_leaves_each_sample_to_be_counted_once(arena: Arena, moment: str) -> None:
    with arena.cell():
        victim = arena.start(f"killed-{moment.partition('@')[0]}", ["--fault.inject", f"{moment}=SIGKILL"])
        arena.until(lambda: not victim.is_running, f"{victim.node_id} ends at {moment}")
        arena.others_go_on()
        assert 0 not in weights_of(arena, victim.node_id)
