"""Chaos in virtual time: what the rules meet, and that each sample that counts is counted once in all of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bench import virtual_run as run_module
from bench.virtual import main
from bench.virtual_models import Chaos, NodeModel, RunModel, transfer_s
from bench.virtual_run import SimulationResult, VirtualRun

from zeroband.elastic.membership.records import Ready

STEP_S, INNER_STEPS, PHASE_S, AGREEMENT_S = 2.0, 10, 20.0, 0.4
CALM = RunModel((NodeModel(STEP_S, 100),) * 10, INNER_STEPS, 10**7, 8 * 10**7, agreement_s=AGREEMENT_S, jitter=0.1)
ROUND_S = PHASE_S + transfer_s(CALM, (100,) * 10) + AGREEMENT_S

KINDS: dict[str, tuple[Chaos, Callable[[SimulationResult], int]]] = {
    "store": (Chaos(store_every_s=150, store_away_s=40), lambda found: found.store_losses),
    "slow link": (Chaos(slow_link_every_s=500, slow_link_s=100, slow_link_part=0.1), lambda found: found.slow_links),
    "cut": (Chaos(cut_every_s=200, cut_s=60), lambda found: found.cuts),
    "leave": (Chaos(leave_every_s=500, grace_s=15), lambda found: found.leaves),
    "crowd loss": (Chaos(crowd_loss_every_s=200), lambda found: found.losses),
    "crowd join": (Chaos(crowd_join_every_s=400, crowd_join_nodes=5), lambda found: found.joins),
}
ALL = replace(
    KINDS["store"][0],
    **{
        name: value / 0.4 if name.endswith("every_s") else value
        for chaos, _ in KINDS.values()
        for name, value in vars(chaos).items()
        if value != getattr(Chaos(), name)
    },
)


def play(rounds: int, *, seed: int = 0, **more: Any) -> SimulationResult:
    return VirtualRun(replace(CALM, **more), seed=seed).play(rounds)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grace", [None, 0.1])
def test_each_kind_strikes_and_each_sample_that_counts_is_counted_once(kind: str, grace: float | None) -> None:
    """The run itself raises where the ledger, what nodes know to have counted, and what they trained do not fit."""
    (chaos, times), struck = KINDS[kind], 0
    for seed in range(4):
        found = play(
            30, seed=seed, chaos=chaos, straggler_grace=grace, overlaps=bool(seed % 2), sites=(None, 3)[seed % 2]
        )
        struck += times(found)
        assert found.rounds == 30 and found.goodput > 0.15
    assert struck >= 4


@pytest.mark.parametrize("seed", range(8))
def test_all_kinds_at_once_leave_the_accounts_exact(seed: int) -> None:
    form = {
        "overlaps": bool(seed % 2),
        "sites": (None, 4)[seed // 2 % 2],
        "straggler_grace": (None, 0.1)[seed // 4 % 2],
    }
    found = play(40, seed=seed, chaos=ALL, mtbf_s=1500.0, away_s=60.0, freeze_every_s=1500.0, freeze_s=8.0, **form)
    assert found.losses and found.leaves and found.wasted
    assert found.tokens + found.wasted <= found.trained


BY_TIME: dict[str, Any] = {"inner_steps": 2 * INNER_STEPS, "inner_seconds": PHASE_S}


@pytest.mark.parametrize("by_time", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_late_and_joining_nodes_leave_the_accounts_exact(seed: int, overlaps: bool, by_time: bool) -> None:
    """Every member of every round brings something to it, joiners in their first one, too."""
    chaos = replace(KINDS["store"][0], crowd_join_every_s=300, crowd_join_nodes=3, leave_every_s=2000)
    more: dict[str, Any] = {"overlaps": overlaps, **(BY_TIME if by_time else {})}
    often: dict[str, Any] = {"mtbf_s": 600.0, "away_s": 40.0, "freeze_every_s": 150.0, "freeze_s": 6.0}
    found = VirtualRun(replace(CALM, chaos=chaos, straggler_grace=0.05, **often, **more), seed=seed).play(60)
    assert found.late > 5 and found.joins > 15 and found.losses > 10 and found.store_losses > 0
    assert found.weightless == 0 and found.tokens + found.wasted <= found.trained


@pytest.mark.parametrize("more", [-1, 1])
def test_node_that_says_another_number_than_it_trained_is_noticed(monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    def say(round: int, weight: int, *rest: Any, **words: Any) -> Ready:
        return Ready(round, weight + more if weight else 0, *rest, **words)

    monkeypatch.setattr(run_module, "Ready", say)
    with pytest.raises(RuntimeError, match="counted"):
        play(3)


def test_members_wait_for_a_store_that_is_away_and_nobody_is_left_out() -> None:
    found = play(30, chaos=Chaos(store_every_s=100, store_away_s=60))
    assert found.store_losses > 3
    assert (found.members, found.reopened, found.joins, found.wasted) == (300, 0, 0, 0)
    assert found.seconds > play(30).seconds + 100 and found.tokens == 300 * INNER_STEPS


def test_lease_of_a_lost_node_outlasts_the_time_for_which_the_store_is_away() -> None:
    """Nobody is known to be lost while the store's time stands still."""
    run = VirtualRun(replace(CALM, away_s=1e9, jitter=0.0, chaos=Chaos(store_every_s=1e9)))
    run.lose_at(PHASE_S, 3)
    run.store_away_at(PHASE_S + 1, 100.0)
    found = run.play(1)
    assert found.seconds > PHASE_S + 1 + 100 + CALM.detect_s and found.members == 9


def test_smaller_side_of_a_cut_is_left_out_and_comes_back_when_it_heals() -> None:
    found = play(60, chaos=Chaos(cut_every_s=400, cut_s=100, cut_part=0.3))
    assert found.cuts > 0 and found.losses == 0
    assert found.joins > 0 and found.joins % 3 == 0, "three of ten each time"
    assert 600 > found.members >= 600 - 3 * found.cuts * (60 - 1)
    assert max(found.joined_s) > CALM.detect_s, "they come in when the cut has healed"


def test_cut_that_is_shorter_than_its_detection_delays_and_leaves_nobody_out() -> None:
    found = play(40, detect_s=1e4, chaos=Chaos(cut_every_s=100, cut_s=20))
    assert found.cuts > 3 and (found.joins, found.wasted, found.members) == (0, 0, 400)


def test_slow_link_sits_rounds_out_where_there_is_a_grace_and_holds_all_back_where_not() -> None:
    slow = Chaos(slow_link_every_s=3000, slow_link_s=400, slow_link_part=0.02)
    waiting, going = play(60, chaos=slow), play(60, chaos=slow, straggler_grace=0.1)
    assert waiting.slow_links and going.slow_links
    assert waiting.late == 0 and going.late > 0
    assert going.seconds < waiting.seconds


def test_node_that_is_asked_to_leave_hands_over_what_it_learned_if_the_others_come_in_time() -> None:
    leaving = Chaos(leave_every_s=1000, grace_s=30.0)
    in_time, hasty = play(60, chaos=leaving), play(60, chaos=replace(leaving, grace_s=0.5))
    assert in_time.leaves > 5 and hasty.leaves > 5 and in_time.losses == 0
    assert in_time.wasted < hasty.wasted / 2, "a phase is shorter than its grace"


def test_crowd_that_is_lost_in_a_transfer_opens_the_round_once_more() -> None:
    run = VirtualRun(replace(CALM, away_s=1e9, jitter=0.0))
    run.lose_at(AGREEMENT_S + PHASE_S + 0.5, 0, 1, 2)
    found = run.play(3)
    assert (found.losses, found.reopened, found.members) == (3, 1, 3 * 7)


def test_crowd_that_joins_is_in_with_the_next_round_after_its_fetch() -> None:
    run = VirtualRun(replace(CALM, jitter=0.0))
    run.join_at(2 * ROUND_S, 20)
    found = run.play(8)
    fetch_s = 8 * 80 * 20 / (10 * 100)  # MB to 20 nodes from 10, at 100 Mbit/s each
    assert found.joins == 20 and fetch_s < max(found.joined_s) < fetch_s + 2.5 * ROUND_S
    assert found.goodput < 1 and found.members > 8 * 10 + 3 * 20


def test_sites_transfer_between_those_that_speak_and_a_lost_one_is_replaced() -> None:
    wide = replace(CALM, encoded_bytes=10**8, jitter=0.0)
    alone, sites = VirtualRun(wide).play(5), VirtualRun(replace(wide, sites=2)).play(5)
    saved_s = transfer_s(wide, (100,) * 10) - transfer_s(wide, (100, 100))
    assert alone.seconds - sites.seconds == pytest.approx(5 * saved_s) and saved_s > 1
    run = VirtualRun(replace(wide, sites=2, away_s=1e9))
    run.lose_at(AGREEMENT_S + PHASE_S + 1.0, 0, 1)
    found = run.play(3)
    assert (found.speakers_lost, found.reopened, found.members) == (2, 1, 3 * 8)


def test_same_seed_gives_the_same_chaos_and_another_one_another() -> None:
    assert play(20, seed=3, chaos=ALL) == play(20, seed=3, chaos=ALL) != play(20, seed=4, chaos=ALL)


def test_command_takes_chaos_and_refuses_what_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nodes", "8", "--params", "10M", "--mbit", "100", "--rounds", "20", "--sites", "2"]
    main([*arguments, "--store-every-s", "300", "--leave-every-s", "900"])
    said = capsys.readouterr().out
    assert "the store was away" in said and "was dealt again" in said and "a joiner" in said
    for wrong, why in {
        "--cut-part=0.5": "--cut-part: 0.5 is not below 0.5",
        "--crowd-join-nodes=1.5": "--crowd-join-nodes: '1.5'",
        "--cut-every-s=0": "--cut-every-s: '0': input should be greater than 0",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, wrong])
        assert why in capsys.readouterr().err
