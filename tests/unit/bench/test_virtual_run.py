"""A run in virtual time goes as the rules say, and takes what its models say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from bench.virtual import main
from bench.virtual_models import NodeModel, RunModel, fetch_s, transfer_s
from bench.virtual_run import SimulationResult, VirtualRun

STEP_S, INNER_STEPS, AGREEMENT_S = 2.0, 10, 0.4
FOUR = RunModel((NodeModel(STEP_S, 100),) * 4, INNER_STEPS, 10**7, 8 * 10**7, agreement_s=AGREEMENT_S, jitter=0.0)
RATES = (100,) * 4
LOSING = replace(FOUR, nodes=FOUR.nodes * 4, mtbf_s=600.0, away_s=60.0, jitter=0.1)


def play(model: RunModel, rounds: int, **more: Any) -> SimulationResult:
    return VirtualRun(replace(model, **more)).play(rounds)


def test_round_takes_its_steps_its_transfer_and_the_agreement() -> None:
    found = play(FOUR, 10)
    moved_s = transfer_s(FOUR, RATES)
    assert moved_s > 1.2, "a node sends and receives 15 MB at 100 Mbit/s"
    assert found.seconds == pytest.approx(AGREEMENT_S + 10 * (INNER_STEPS * STEP_S + moved_s + AGREEMENT_S))
    assert (found.rounds, found.tokens, found.members) == (10, 4 * 10 * INNER_STEPS, 40)
    assert found.goodput == pytest.approx(10 * INNER_STEPS * STEP_S / found.seconds)
    assert sum(found.spent_s.values()) == pytest.approx(4 * found.seconds)


def test_overlap_hides_what_is_shorter_than_the_steps() -> None:
    found = play(FOUR, 10, overlaps=True)
    moved_s = transfer_s(FOUR, RATES) + AGREEMENT_S
    assert found.seconds == pytest.approx(AGREEMENT_S + 10 * INNER_STEPS * STEP_S + moved_s)
    slow = play(FOUR, 10, overlaps=True, encoded_bytes=10**9)
    assert slow.seconds == pytest.approx(
        AGREEMENT_S + INNER_STEPS * STEP_S + 10 * (transfer_s(replace(FOUR, encoded_bytes=10**9), RATES) + 0.4)
    )


def test_round_waits_for_the_slowest_unless_there_is_a_deadline() -> None:
    nodes = (*FOUR.nodes[:3], NodeModel(10 * STEP_S, 100))
    waiting, going = play(FOUR, 10, nodes=nodes), play(FOUR, 100, nodes=nodes, straggler_s=1.0)
    assert waiting.seconds / 10 > 10 * INNER_STEPS * STEP_S
    assert going.seconds / 100 < 1.5 * INNER_STEPS * STEP_S
    assert going.tokens > 3 * 100 * INNER_STEPS, "what the slow one learned counts, too"
    assert 300 < going.members < 320


def test_phases_that_end_after_a_time_wait_for_no_slow_node() -> None:
    nodes = (*FOUR.nodes[:3], NodeModel(4 * STEP_S, 100))
    timed: dict[str, Any] = {"inner_steps": 2 * INNER_STEPS, "inner_seconds": INNER_STEPS * STEP_S}
    by_steps, by_time = play(FOUR, 20, nodes=nodes), play(FOUR, 20, nodes=nodes, **timed)
    assert by_steps.seconds > 3 * by_time.seconds
    assert by_time.tokens == by_time.trained == 20 * (3 * INNER_STEPS + 2)
    uneven = play(LOSING, 60, **timed)
    assert uneven.losses > 10 and uneven.goodput > play(LOSING, 60).goodput


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("straggler_s", [None, 1.0])
def test_run_outlasts_its_losses_and_each_sample_counts_once(overlaps: bool, straggler_s: float | None) -> None:
    found = play(LOSING, 60, overlaps=overlaps, straggler_s=straggler_s)
    assert found.losses > 12 and found.joins > 6 and found.reopened > 0
    assert 0.3 < found.goodput < 0.9 and found.spent_s["away"] > 0


def test_lost_node_costs_the_others_the_detection_and_a_transfer_once() -> None:
    """Of two runs of which one loses a node that stays away."""
    whole = play(FOUR, 20)
    lost = VirtualRun(replace(FOUR, mtbf_s=1e9, away_s=1e9))
    lost.lose_at(5 * (INNER_STEPS * STEP_S), 3)
    found = lost.play(20)
    assert (found.losses, found.members) == (1, 4 * 4 + 3 * 16)
    most_s = FOUR.detect_s + transfer_s(FOUR, RATES) + 2 * AGREEMENT_S
    assert 0 < found.seconds - whole.seconds < most_s + 16 * 1.0, "three send no more than four"


def test_short_freezes_delay_and_long_ones_cost_the_membership() -> None:
    short = play(LOSING, 30, mtbf_s=None, freeze_every_s=200.0, freeze_s=0.5)
    assert short.joins == 0 and short.tokens == short.trained == 16 * 30 * INNER_STEPS
    assert short.seconds > play(LOSING, 30, mtbf_s=None).seconds
    long = play(LOSING, 30, mtbf_s=None, freeze_every_s=200.0, freeze_s=60.0)
    assert long.losses == 0 and long.joins > 5 and long.goodput < short.goodput


def test_grace_leaves_a_late_member_behind_and_counts_what_it_learned_later() -> None:
    freezing = replace(LOSING, mtbf_s=None, freeze_every_s=400.0, freeze_s=4.0)
    waiting, going = play(freezing, 50), play(freezing, 50, straggler_grace=0.05)
    assert waiting.late == 0 and going.late > 5
    assert going.seconds < waiting.seconds and going.tokens > 0.99 * going.trained


@pytest.mark.parametrize("overlaps", [False, True])
def test_joiner_trains_at_once_and_counts_in_the_first_round_that_has_it(overlaps: bool) -> None:
    found = VirtualRun(replace(LOSING, overlaps=overlaps)).play(60)
    assert found.joins > 6 and found.weightless == 0


BY_TIME: dict[str, Any] = {"overlaps": True, "inner_steps": 2 * INNER_STEPS, "inner_seconds": INNER_STEPS * STEP_S}


def test_joiner_by_time_counts_with_the_others_at_their_next_boundary() -> None:
    """It comes there with what it learned in a part of a phase, and from then on with them."""
    run = VirtualRun(replace(FOUR, state_bytes=0, rtt_ms=0, encoded_bytes=0, **BY_TIME))
    joins_at_s = AGREEMENT_S + 2.6 * INNER_STEPS * STEP_S
    run.join_at(joins_at_s, 1)
    found = run.play(6)
    assert (found.joins, found.joined_s, found.members) == (1, [0.0], 2 * 4 + 4 * 5)
    assert found.spent_s["waiting"] == 0 and found.wasted == 0
    part = 0.4 * INNER_STEPS
    assert 0 <= found.tokens - (4 * 6 + 3) * INNER_STEPS - part <= 1 + 3 * 5, "at most a step more of each in a round"


class Stopped(VirtualRun):
    """A run of which a node stands still once, for less than its lease."""

    def stand_still(self, number: int, *, at_s: float, seconds: float) -> None:
        node = self._nodes[number]

        def freeze() -> None:
            assert node.phase is not None, "it trains"
            node.phase.stands_at_s, node.phase.stands_s = at_s, seconds
            self._plan_end(node)

        self._after(at_s, freeze)


def test_late_member_by_time_comes_back_with_the_next_round() -> None:
    run = Stopped(replace(FOUR, encoded_bytes=0, straggler_grace=0.15, **BY_TIME))
    run.stand_still(3, at_s=AGREEMENT_S + 1.9 * INNER_STEPS * STEP_S, seconds=8.0)
    found = run.play(8)
    assert (found.late, found.members) == (1, 8 * 4 - 1)
    assert found.spent_s["waiting"] == 0 and found.wasted == 0


@pytest.mark.parametrize("overlaps", [False, True])
def test_each_second_of_a_node_is_in_one_account(overlaps: bool) -> None:
    """What is trained lies between what counts and what nodes were there for."""
    found = play(LOSING, 60, overlaps=overlaps, freeze_every_s=300.0, freeze_s=4.0)
    spent_s = sum(found.spent_s.values())
    assert spent_s == pytest.approx(16 * found.seconds)
    in_vain_s = found.training * spent_s - found.tokens * STEP_S
    assert found.wasted_s <= in_vain_s <= found.wasted_s + (found.losses + 16) * (2 * INNER_STEPS * STEP_S + STEP_S)
    assert 0 < found.goodput < found.training < 1 - found.spent_s["away"] / spent_s


def test_joiner_fetches_the_state_before_it_takes_part() -> None:
    assert fetch_s(FOUR, 100) == pytest.approx(8 * 80 / 100 + 0.1)


def test_command_prints_what_came_of_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nodes", "8", "--params", "10M", "--mbit", "100,50", "--rounds", "20", "--mtbf-s", "3000"]
    main(arguments)
    said = capsys.readouterr().out
    assert "20 rounds of 8 nodes" in said and "every sample that counts was counted once" in said
    with pytest.raises(SystemExit, match="2"):
        main([*arguments[:-1], "0"])
    assert "--mtbf-s: '0': input should be greater than 0" in capsys.readouterr().err
