"""A round as a transaction, with real algorithms on it: what a lost, slow or wrong member may do to the others."""

import errno
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from zeroband.config.outer import DdpConfig, DilocoConfig, OuterSGDConfig, SparseLocoConfig
from zeroband.elastic.membership.records import Ready, RoundPlan
from zeroband.elastic.rounds import runner
from zeroband.elastic.rounds.exchange import CONTRIBUTION, RESULT
from zeroband.elastic.rounds.phase import TransferWindow
from zeroband.errors import Fenced, PeerLost, RecoveryFailed, RoundFailed
from zeroband.state.digest import digest_of
from zeroband.state.flat import FlatLayout

DILOCO = DilocoConfig(type="diloco", inner_steps=1, optimizer=OuterSGDConfig(lr=0.7, momentum=0.9))
DDP = DdpConfig(type="ddp")
SPARSE = SparseLocoConfig(type="sparseloco", inner_steps=1, k=2, chunk=4)
Algorithm = DilocoConfig | DdpConfig
StartRun = Callable[..., Any]
Noise = Callable[..., Tensor]
ALGORITHMS = pytest.mark.parametrize("algorithm", [DILOCO, DDP], ids=["diloco", "ddp"])


def contribution_of(algorithm: Algorithm, before: Tensor, update: Tensor) -> Tensor:
    """What a node sends for an update of its parameters (DiLoCo) or a gradient (DDP)."""
    return before - (before + update) if algorithm is DILOCO else update


@ALGORITHMS
def test_founding_is_a_round_of_all_founders_that_moves_nothing(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b")
    assert [(v.round, v.members, v.plan.weights) for v in run.store.verdicts] == [(0, ("a", "b"), (0, 0))]
    assert run["a"].outer.round == run["b"].outer.round == 0
    assert run["a"].outer.progress.assigned == {"a": ((0, 4),), "b": ((4, 8),)}


@ALGORITHMS
@pytest.mark.parametrize("lanes", [1, 3, 4])
@pytest.mark.defect(6)
@pytest.mark.defect(11)
def test_mean_is_weighted_and_complete_when_lanes_do_not_divide_the_state(
    start_run: StartRun, noise: Noise, algorithm: Algorithm, lanes: int
) -> None:
    run = start_run(algorithm, "a", "b", lanes=lanes)
    before, updates = run["a"].params, {"a": noise(1), "b": noise(2)}
    run.together(a=lambda: run["a"].take_step(updates["a"], 30), b=lambda: run["b"].take_step(updates["b"], 10))
    expected = sum(
        contribution_of(algorithm, before, updates[name]) * share for name, share in (("a", 0.75), ("b", 0.25))
    )
    assert torch.equal(run["a"].buffers[RESULT], expected)
    assert torch.equal(run["b"].buffers[RESULT], expected)
    assert expected[-1] != 0


@ALGORITHMS
@pytest.mark.parametrize("point", ["opened", "reduced"])
@pytest.mark.defect(4)
@pytest.mark.defect(11)
def test_round_that_loses_a_member_is_retried_with_what_the_others_contributed(
    start_run: StartRun, noise: Noise, algorithm: Algorithm, point: str
) -> None:
    run = start_run(algorithm, "a", "b", "c", inject={"c": [f"{point}@1=SIGKILL"]})
    before, updates = run["a"].params, {"a": noise(1), "b": noise(2), "c": noise(3)}
    reports = run.round(**updates)
    assert reports.keys() == {"a", "b"}
    expected = sum(contribution_of(algorithm, before, updates[name]) * 0.5 for name in ("a", "b"))
    for name, report in reports.items():
        assert (report.round, report.members, report.weights, report.retries) == (1, ("a", "b"), (10, 10), 1)
        assert len(report.failures) == 1
        assert torch.equal(run[name].buffers[CONTRIBUTION], contribution_of(algorithm, before, updates[name]))
        assert torch.equal(run[name].buffers[RESULT], expected)
    assert reports["a"].state_digest == reports["b"].state_digest
    assert any("c" in reason for report in reports.values() for reason in report.failures)


def fail_transfers(lanes: Any, until_version: int) -> None:
    """Have all transfers up to this version of the plan break, and leave the same behind on every member."""
    all_reduce = lanes.all_reduce

    def fail(parts: Any, plan: RoundPlan) -> None:
        if plan.version > until_version:
            return all_reduce(parts, plan)
        for _, part in parts:
            part.zero_()
        raise PeerLost("the transfer broke")

    lanes.all_reduce = fail


@pytest.mark.defect(4)
@pytest.mark.defect(11)
@ALGORITHMS
def test_round_whose_transfers_fail_is_committed_by_none_of_them(
    start_run: StartRun, noise: Noise, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that failed together hold equal results, and one that has failed often still has its own update."""
    monkeypatch.setattr(runner, "FIRST_PAUSE_S", 0.0)
    run = start_run(algorithm, "a", "b")
    before, updates, founding = run["a"].params, {"a": noise(1), "b": noise(2)}, run.store.plans[-1]
    for name in ("a", "b"):
        fail_transfers(run[name].lanes, until_version=founding.version + 5)
    reports = run.round(**updates)
    tried = [plan for plan in run.store.plans if plan.round == 1]
    assert [plan in run.store.record.failed for plan in tried] == [True] * 5 + [False]
    assert [verdict.plan for verdict in run.store.verdicts if verdict.round == 1] == tried[-1:]
    contributions = {name: contribution_of(algorithm, before, updates[name]) for name in ("a", "b")}
    for name, report in reports.items():
        assert torch.equal(run[name].buffers[CONTRIBUTION], contributions[name])
        assert torch.equal(run[name].buffers[RESULT], contributions["a"] * 0.5 + contributions["b"] * 0.5)
        assert report.weights == (10, 10)
    assert reports["a"].state_digest == reports["b"].state_digest
    assert torch.equal(run["a"].params, run["b"].params)


@ALGORITHMS
def test_round_that_fails_time_and_again_ends_the_node_with_a_sentence(
    start_run: StartRun, noise: Noise, algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "MOST_RETRIES", 1)
    run = start_run(algorithm, "a", "b")
    for name in ("a", "b"):
        fail_transfers(run[name].lanes, until_version=100)
    with pytest.raises(RoundFailed, match="round 1 was opened 3 times to 2 members of which none was lost"):
        run.round(a=noise(1), b=noise(2))


@ALGORITHMS
def test_result_that_a_lost_transfer_may_write_to_is_renewed(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b", "c", inject={"c": ["opened@1=SIGKILL"]})
    reports = run.round(a=noise(1), b=noise(2), c=noise(3))
    for name in ("a", "b"):
        node, kept = run[name], run[name].buffers[RESULT].clone()
        assert node.lanes.abandoned
        for part in node.lanes.abandoned:
            part.fill_(float("nan"))
        assert torch.equal(node.buffers[RESULT], kept)
        assert torch.equal(node.entry(1).update.view(torch.float32), kept)
        assert node.outer.state_digest == reports[name].state_digest
    assert run.round(a=noise(4), b=noise(5))["a"].state_digest == run["b"].outer.state_digest


@ALGORITHMS
def test_round_that_loses_two_members_one_after_the_other_counts_two_failures(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    inject = {"b": ["reduced@1=SIGKILL"], "c": ["opened@1=SIGKILL"]}
    run = start_run(algorithm, "a", "b", "c", inject=inject)
    with run.hurry():  # the last one gives the others a lease to show themselves
        report = run.round(a=noise(1), b=noise(2), c=noise(3))["a"]
    assert (report.members, report.retries) == (("a",), 2)
    assert torch.equal(run["a"].buffers[RESULT], run["a"].buffers[CONTRIBUTION])


@ALGORITHMS
def test_member_that_dies_after_its_vote_does_not_stop_the_round(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b", inject={"b": ["committed@1=SIGKILL"]})
    reports = run.round(a=noise(1), b=noise(2))
    assert (reports["a"].members, reports["a"].retries) == (("a", "b"), 0)


@ALGORITHMS
@pytest.mark.defect(6)
def test_result_that_arrives_damaged_on_one_member_is_applied_by_nobody(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run, sound = start_run(algorithm, "a", "b"), [noise(1), noise(2)]
    run["b"].lanes.damage = lambda part: part[0].add_(1e-3)
    reports = run.round(a=sound[0], b=sound[1])
    before = [plan for plan in run.store.plans if plan.round == 1]
    assert len(before) == 2
    assert run.store.record.failed[before[0]].value == "the members hold different results"
    assert [v.plan for v in run.store.verdicts if v.round == 1] == [before[1]]
    assert {(r.retries, r.state_digest) for r in reports.values()} == {(1, run["a"].outer.state_digest)}


@ALGORITHMS
def test_no_member_applies_before_the_verdict(start_run: StartRun, noise: Noise, algorithm: Algorithm) -> None:
    run = start_run(algorithm, "a", "b", inject={"b": ["reduced@1=SIGKILL"]})
    states: list[str] = []
    node = run["a"]
    lanes_reduce = node.lanes.all_reduce

    def observe(parts, plan) -> None:
        states.append(digest_of(*(node.buffers[name] for name in node.outer.sections)))
        lanes_reduce(parts, plan)

    node.lanes.all_reduce = observe
    run.round(a=noise(1), b=noise(2))
    assert len(states) == 2
    assert states[0] == states[1]
    assert states[1] != digest_of(*(node.buffers[name] for name in node.outer.sections))


@ALGORITHMS
def test_member_that_was_away_is_fenced_and_keeps_its_state(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b")
    state, outer = run["b"].outer.state_digest, [run["b"].buffers[name].clone() for name in run["b"].outer.sections]
    run["b"].member.close()  # its lease ran out while it made its inner steps
    run.round(a=noise(1))
    outcome = run.together(b=lambda: run["b"].take_step(noise(2), 10))["b"]
    assert isinstance(outcome, Fenced)
    assert (run["b"].outer.round, run["b"].outer.state_digest) == (0, state)
    assert all(torch.equal(run["b"].buffers[n], kept) for n, kept in zip(run["b"].outer.sections, outer, strict=True))
    assert run["b"].entry(1) is None


@ALGORITHMS
def test_update_that_is_not_finite_is_left_out_and_its_samples_return(
    start_run: StartRun, noise: Noise, algorithm: Algorithm, caplog: pytest.LogCaptureFixture
) -> None:
    run = start_run(algorithm, "a", "b")
    before, update, bad = run["a"].params, noise(1), noise(2)
    bad[21] = float("inf")
    reports = run.round(a=update, b=bad)
    assert reports["a"].weights == reports["b"].weights == (10, 0)
    assert (reports["a"].is_left_out, reports["b"].is_left_out) == (False, True)
    spoilt = [slot.name for slot in FlatLayout.of(run["b"].model).slots if slot.start <= 21 < slot.start + slot.numel]
    said = [vars(record)["fields"] for record in caplog.records if "non-finite" in record.message]
    assert said == [{"round": 1, "parameters": 1, "first": spoilt[0]}]
    assert torch.equal(run["b"].buffers[RESULT], contribution_of(algorithm, before, update))
    assert reports["a"].state_digest == reports["b"].state_digest
    assert torch.equal(run["a"].params, run["b"].params)
    assert run["b"].params.isfinite().all()
    assert run["a"].outer.progress.tokens == 10
    assert run["a"].outer.progress.assigned == {"a": ((4, 8),), "b": ((8, 12),)}  # b's 4..8 are the first to be read


@ALGORITHMS
def test_node_recovers_from_an_update_that_was_not_finite(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b")
    for moment in run["b"].inner.moments()["exp_avg"].values():
        moment.fill_(float("nan") if algorithm is DILOCO else 0.0)  # what a gradient without a number leaves behind
    run.round(a=noise(1), b=noise(2) * float("nan"))
    assert all(moment.isfinite().all() for moment in run["b"].inner.named_moments().values())
    report = run.round(a=noise(3), b=noise(4))["b"]
    assert (report.weights, report.is_left_out) == ((10, 10), False)


@ALGORITHMS
def test_round_in_which_nobody_has_weight_moves_nothing(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a", "b")
    run.round(a=noise(1), b=noise(2))
    before, state = run["a"].params, run["a"].outer.state_digest
    reports = run.round(a=noise(3) * float("nan"), b=noise(4) * float("nan"))
    for name, report in reports.items():
        assert (report.round, report.weights, report.state_digest) == (2, (0, 0), state)
        assert torch.equal(run[name].params, before)
    assert run["a"].outer.progress.tokens == 20


@ALGORITHMS
def test_tokens_count_from_one_committed_round_to_the_next(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a")
    run.round(tokens=7, a=noise(1))
    report = run.round(tokens=5, a=noise(2))["a"]
    assert report.weights == (5,)
    assert run["a"].outer.progress.tokens == 12


@ALGORITHMS
def test_report_says_what_crossed_the_network(start_run: StartRun, noise: Noise, algorithm: Algorithm) -> None:
    run = start_run(algorithm, "a", "b")
    report = run.round(a=noise(1), b=noise(2))["a"]
    assert report.sent_bytes == report.received_bytes == 22 * 4  # 2 (M - 1) / M of the buffer
    run["b"].member.close()
    report = run.round(a=noise(3))["a"]
    assert report.sent_bytes == report.received_bytes == 0


# -- joining --------------------------------------------------------------------------------------------------------


@ALGORITHMS
@pytest.mark.defect(7)
def test_node_that_receives_the_state_holds_what_its_members_hold(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a")
    make_rounds(run, "a", noise)
    joiner = run.add("b")
    assert joiner.receive(run["a"]) == run["a"].outer.state_digest == joiner.outer.state_digest
    assert (joiner.outer.round, joiner.outer.progress) == (run["a"].outer.round, run["a"].outer.progress)
    assert torch.equal(joiner.params, run["a"].params)
    assert joiner.inner.step_count == run["a"].inner.step_count


def make_rounds(run: Any, name: str, noise: Noise) -> None:
    """Make a few rounds."""
    for seed in range(3):
        run.round(**{name: noise(seed)})


def test_node_that_joins_with_weight_0_holds_the_same_state_from_then_on(start_run: StartRun, noise: Noise) -> None:
    """Where every step is a round."""
    run = start_run(DDP, "a")
    make_rounds(run, "a", noise)
    joiner = run.add("b")
    joiner.receive(run["a"])
    before, update = run["a"].params, noise(20)
    outcome = run.round_with_joiner("b", a=update)
    assert outcome["a"].members == outcome["b"].members == ("a", "b")
    assert outcome["a"].weights == (10, 0)
    assert torch.equal(run["a"].buffers[RESULT], contribution_of(DDP, before, update))
    assert outcome["a"].state_digest == outcome["b"].state_digest
    assert not outcome["b"].is_left_out
    for seed in (30, 40):
        reports = run.round(a=noise(seed), b=noise(seed + 1))
        assert reports["a"].state_digest == reports["b"].state_digest
        assert reports["a"].weights == (10, 10)
    assert torch.equal(run["a"].params, joiner.params)


@ALGORITHMS
def test_journal_replayed_gives_the_state_of_those_who_were_there(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a")
    make_rounds(run, "a", noise)
    joiner, fetched = run.add("b"), run["a"].outer.round
    joiner.receive(run["a"])
    for seed in range(50, 54):
        run.round(a=noise(seed, scale=3.0))  # large enough that gradients are clipped
    assert run["a"].outer.round == fetched + 4
    assert run.catch_up("b") == run["a"].outer.state_digest
    assert joiner.outer.progress == run["a"].outer.progress
    assert joiner.inner.step_count == run["a"].inner.step_count
    assert torch.equal(joiner.params, run["a"].params)


def test_rounds_that_were_replayed_are_kept_for_others_once_the_state_is_verified(
    start_run: StartRun, noise: Noise
) -> None:
    run = start_run(SPARSE, "a", "b")
    joiner = run.add("c")
    joiner.receive(run["a"])
    run.round(a=noise(1), b=noise(2))
    run.damage = lambda update: torch.cat([update[:-1], update[-1:] ^ 1])
    with pytest.raises(RecoveryFailed):
        run.catch_up("c")
    assert joiner.journal.await_entry(1, timeout_s=0) is None
    run.damage = torch.clone
    joiner.receive(run["a"])
    run.round(a=noise(3), b=noise(4))
    run.catch_up("c")
    run.settle_journals()
    kept, theirs = (run[name].journal.await_entry(2, timeout_s=0) for name in "ca")
    assert (kept.record, kept.state_digest) == (theirs.record, theirs.state_digest)
    assert torch.equal(kept.update, theirs.update)


def test_link_is_needed_while_contributions_travel_for_which_training_stands_still(
    start_run: StartRun, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(DILOCO, "a", "b")
    outer, seen = run["a"].outer, list[bool]()

    def look_before(owner: object, name: str) -> None:
        act = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *of, **options: (seen.append(outer.needs_link), act(*of, **options))[1])

    look_before(run["a"].mesh, "announce_ready")
    look_before(outer.exchange, "run")
    look_before(run["a"].mesh, "vote")
    assert not outer.needs_link
    run.round(a=noise(1), b=noise(2))
    assert seen == [True, True, False] and not outer.needs_link


def test_link_is_free_again_where_the_others_are_not_there_in_time() -> None:
    announced, travelling = (TransferWindow(100.0, 50.0, at_most_s) for at_most_s in (1.0, math.inf))
    assert [announced.owns_link(at_s) for at_s in (100.5, 101.5)] == [True, False]
    assert [travelling.owns_link(at_s) for at_s in (149.0, 151.0)] == [True, False]


def test_node_whose_disk_is_full_replays_from_memory_and_keeps_nothing(
    start_run: StartRun, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start_run(SPARSE, "a", "b")
    joiner = run.add("c")
    joiner.receive(run["a"])
    run.round(a=noise(1), b=noise(2))

    def no_space(nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(joiner.journal, "room", no_space)
    assert run.catch_up("c") == run["a"].outer.state_digest
    assert joiner.journal.await_entry(1, timeout_s=0) is None


@ALGORITHMS
def test_replay_of_a_round_in_which_nobody_had_weight_moves_nothing(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a")
    make_rounds(run, "a", noise)
    joiner = run.add("b")
    joiner.receive(run["a"])
    for update in (noise(1) * float("nan"), noise(2)):
        run.round(a=update)
        assert run.catch_up("b") == run["a"].outer.state_digest


@ALGORITHMS
def test_state_received_after_a_round_without_weight_goes_on_like_its_donors(
    start_run: StartRun, noise: Noise, algorithm: Algorithm
) -> None:
    run = start_run(algorithm, "a")
    run.round(a=noise(1) * float("nan"))
    make_rounds(run, "a", noise)
    joiner = run.add("b")
    joiner.receive(run["a"])
    run.round(a=noise(3))
    assert run.catch_up("b") == run["a"].outer.state_digest


@ALGORITHMS
def test_node_with_another_state_is_not_in_the_round(start_run: StartRun, noise: Noise, algorithm: Algorithm) -> None:
    run = start_run(algorithm, "a")
    stranger = run.add("b")
    stranger.mesh.announce_ready(Ready(1, 5, "another state"))
    assert run.round(a=noise(1))["a"].members == ("a",)
