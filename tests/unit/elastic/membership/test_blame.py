"""Who is at fault for a round that failed: the rules over what its members testify, case by case."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.membership.blame import (
    NO_VOTE,
    REFUSED,
    TOLERATED_RETRIES,
    active_blames,
    barring_blame,
    is_refusal,
    judge,
    merge_blames,
    refusal,
    sitting_out,
)
from zeroband.elastic.membership.keys import NodeKey
from zeroband.elastic.membership.records import Blame, Evidence, RoundPlan

A, B, C, D, E = "a#1", "b#1", "c#1", "d#1", "e#1"
FOUR = (A, B, C, D)


def a_plan(*members: str, **fields: Any) -> RoundPlan:
    return RoundPlan(5, 2, 3, members, (1,) * len(members), **fields)


def holding(members: tuple[str, ...], *others: tuple[str, str, str]) -> dict[str, Evidence]:
    """All hold the same parts, except where (receiver, sender, bytes) says otherwise."""
    held = {receiver: {sender: f"bytes of {sender}" for sender in members} for receiver in members}
    for receiver, sender, content in others:
        held[receiver][sender] = content
    return {m: Evidence(held=tuple(held[m][sender] for sender in members)) for m in members}


def votes_of(said: Mapping[str, Evidence]) -> dict[str, str]:
    return {m: str(hash(evidence.held)) for m, evidence in said.items()}


def found(blames: tuple[Blame, ...]) -> set[tuple[tuple[str, ...], str]]:
    return {(blame.members, blame.consequence) for blame in blames}


# -- bytes that differ --------------------------------------------------------------------------------------------


def test_owner_that_sends_different_bytes_to_most_is_put_out_and_no_one_else() -> None:
    said = holding(FOUR, (A, B, "x"), (C, B, "y"))
    blames = judge(a_plan(*FOUR), votes_of(said), said)
    assert found(blames) == {((B,), "out")} and blames[0].is_lie
    assert A in blames[0].reason and C in blames[0].reason


def test_minority_that_holds_what_nobody_else_holds_is_not_put_out_for_it() -> None:
    """The owner told one member something else than all others, and says what the others say."""
    said = holding(FOUR, (A, B, "x"))
    assert found(judge(a_plan(*FOUR), votes_of(said), said)) == {((A, B), "apart")}


def test_owner_that_lies_to_one_after_the_other_is_found_by_what_is_remembered() -> None:
    before = judge(a_plan(*FOUR), {}, holding(FOUR, (A, B, "x")))
    there = (B, C, D)  # A sits out, since B takes part
    said = holding(there, (D, B, "x"))
    assert found(judge(a_plan(*there, late=(A,), blames=before), votes_of(said), said)) == {((B,), "out")}


def test_who_accuses_everybody_is_put_out_itself() -> None:
    said = holding(FOUR, (A, B, "x"), (A, C, "x"), (A, D, "x"))
    assert found(judge(a_plan(*FOUR), votes_of(said), said)) == {((A,), "out")}


def test_two_liars_of_five_cannot_have_an_honest_member_put_out() -> None:
    five = (A, B, C, D, E)
    said = holding(five, (A, C, "x"), (B, C, "x"))
    blames = judge(a_plan(*five), votes_of(said), said)
    assert found(blames) == {((A, C), "apart"), ((B, C), "apart")}


def test_of_two_members_neither_is_put_out() -> None:
    said = holding((A, B), (A, B, "x"))
    assert found(judge(a_plan(A, B), votes_of(said), said)) == {((A, B), "apart")}


@given(st.data())
def test_no_honest_member_is_ever_put_out_while_fewer_than_half_lie(data: st.DataObject) -> None:
    """Liars say, and send, whatever they like; honest members tell what came."""
    members = tuple(f"{name}#1" for name in "abcdefg"[: data.draw(st.integers(2, 7))])
    liars = data.draw(st.sets(st.sampled_from(members), max_size=(len(members) - 1) // 2))
    content = st.sampled_from(["", "x", "y"])
    names = st.lists(st.sampled_from(members), max_size=2, unique=True).map(tuple)

    def seen(receiver: str) -> Evidence:
        if receiver in liars:
            held = tuple(data.draw(content) for _ in members) if data.draw(st.booleans()) else ()
            return Evidence(held, data.draw(names), data.draw(names), data.draw(names))
        got = tuple(data.draw(content) or "z" if sender in liars else f"of {sender}" for sender in members)
        silent = tuple(sorted(liars)) if data.draw(st.booleans()) else ()
        return Evidence(lacks=silent) if silent else Evidence(held=got)

    said = {m: seen(m) for m in members if m not in liars or data.draw(st.booleans())}
    votes = {m: data.draw(content) if m in liars else str(e.held) for m, e in said.items() if e.held or m in liars}
    plan = a_plan(*members, retries=data.draw(st.integers(0, 3)))
    silent = [m for m in members if m not in said]
    out = {m for blame in judge(plan, votes, said, silent) for m in blame.members if len(blame.members) == 1}
    assert out <= liars
    taken = data.draw(st.sets(st.sampled_from(members)))
    rest = {m: evidence for m, evidence in said.items() if m not in taken}
    found = judge(plan, votes, rest, [m for m in members if m not in rest])
    assert {m for b in found if b.is_lie and len(b.members) == 1 for m in b.members} <= liars, "whatever is taken away"


# -- audits ---------------------------------------------------------------------------------------------------------

ALIKE = ("sa", "sb", "sc", "sd")
"""What all were shown."""


def seen(*wrong: str, denied: tuple[str, ...] = (), shown: tuple[str, ...] = ALIKE) -> Evidence:
    return Evidence(("h",) * 4, shown=shown, wrong=wrong, denied=denied)


AUDITS: dict[str, tuple[dict[str, Evidence], set[tuple[tuple[str, ...], str]]]] = {
    "all say that the sum of B is wrong": ({A: seen(B), B: seen(), C: seen(B), D: seen(B)}, {((B,), "out")}),
    "one says so": ({A: seen(B), B: seen(), C: seen(), D: seen()}, {((A, B), "apart")}),
    "B says that D showed another part": (
        {A: seen(B), B: seen(B, denied=(D,)), C: seen(B), D: seen(B)},
        {((B, D), "apart")},
    ),
    "B says so of all": ({A: seen(B), B: seen(denied=(A, C, D)), C: seen(B), D: seen(B)}, {((B,), "out")}),
    "B says so of nobody that is there": (
        {A: seen(B), B: seen(denied=("x#1", B)), C: seen(B), D: seen(B)},
        {((B,), "out")},
    ),
    "D showed A something else": (
        {A: seen(B, shown=("sa", "sb", "sc", "x")), B: seen(), C: seen(), D: seen()},
        {((A, D), "apart")},
    ),
    "D showed all something else than it says": (
        {**{m: seen(B) for m in (A, B, C)}, D: seen(B, shown=("sa", "sb", "sc", "x"))},
        {((D,), "out")},
    ),
    "B voted, and does not say what it was shown": (
        {A: seen(B), B: seen(shown=()), C: seen(B), D: seen(B)},
        {((B,), "out")},
    ),
}


@pytest.mark.parametrize("case", AUDITS)
def test_audit_puts_out_whom_it_proves_wrong_and_keeps_words_against_words_apart(case: str) -> None:
    said, expected = AUDITS[case]
    votes = {m: refusal(m) if evidence.wrong or evidence.denied else "d" for m, evidence in said.items()}
    blames = judge(a_plan(*FOUR), votes, said)
    assert found(blames) == expected and all(blame.is_lie for blame in blames)


def test_who_refuses_a_result_without_a_reason_is_put_out() -> None:
    said: dict[str, Evidence] = dict.fromkeys(FOUR, seen())
    assert found(judge(a_plan(*FOUR), {**dict.fromkeys(FOUR, "d"), C: refusal(C)}, said)) == {((C,), "out")}


def test_refusals_are_no_votes_for_different_results() -> None:
    said = {A: seen(B), B: seen(), C: seen(B), D: seen(B)}
    votes = {A: refusal(A), B: "d", C: refusal(C), D: refusal(D)}
    assert [blame.members for blame in judge(a_plan(*FOUR), votes, said)] == [(B,)]
    assert not is_refusal("d") and is_refusal(refusal(A))


@given(st.data())
def test_no_honest_member_is_put_out_for_an_audit_while_fewer_than_half_lie(data: st.DataObject) -> None:
    """One draws, and tells others another stretch where it lies; liars send, show and say whatever they like."""
    members = tuple(f"{name}#1" for name in "abcdefg"[: data.draw(st.integers(2, 7))])
    liars = data.draw(st.sets(st.sampled_from(members), max_size=(len(members) - 1) // 2))
    drawer, owner = data.draw(st.sampled_from(members)), data.draw(st.sampled_from(members))
    content, names = st.sampled_from(["x", "y"]), st.lists(st.sampled_from(members), max_size=2, unique=True).map(tuple)
    drawn = {m: data.draw(content) if drawer in liars else "x" for m in members}
    sent = {(m, d): data.draw(content) if m in liars else f"{m} of {d}" for m in members for d in "xy"}

    def shown_to(receiver: str, sender: str) -> str:
        return data.draw(content) if sender in liars else sent[sender, drawn[sender]]

    def seen_by(member: str) -> Evidence:
        if member in liars:
            shown = tuple(data.draw(content) for _ in members) if data.draw(st.booleans()) else ()
            return Evidence(("h",) * len(members), shown=shown, wrong=data.draw(names), denied=data.draw(names))
        shown = [shown_to(member, sender) for sender in members]
        came = [sent[sender, drawn[member]] for sender in members]
        is_wrong = data.draw(st.booleans()) if owner in liars else shown != came
        denied = [s for s, one, other in zip(members, shown, came, strict=True) if one != other]
        own_draw = [drawn[member] if sender == drawer else "" for sender in members]
        hashes = tuple(draw + what for draw, what in zip(own_draw, shown, strict=True))
        wrong = (owner,) if is_wrong else ()
        return Evidence(
            ("h",) * len(members), shown=hashes, wrong=wrong, denied=tuple(denied) if member == owner else ()
        )

    said = {m: seen_by(m) for m in members if m not in liars or data.draw(st.booleans())}
    unfinished = data.draw(st.sets(st.sampled_from(members))) if data.draw(st.booleans()) else set[str]()
    said |= {m: Evidence() for m in unfinished if m not in liars}
    votes = {m: refusal(m) if e.wrong or e.denied else "d" for m, e in said.items() if e.shown or m in liars}
    blames = judge(a_plan(*members), votes, said)
    assert {m for blame in blames for m in blame.members if len(blame.members) == 1} <= liars
    assert all(liars & set(blame.members) for blame in blames if blame.is_lie), "of a pair one lies"


# -- votes and words that do not follow -----------------------------------------------------------------------------


def test_vote_that_does_not_follow_from_what_its_member_holds_is_a_lie() -> None:
    said = holding(FOUR)
    votes = {**dict.fromkeys(FOUR, "d"), C: "odd"}
    assert found(judge(a_plan(*FOUR), votes, said)) == {((C,), "out")}


def test_voter_that_does_not_tell_what_it_holds_is_put_out() -> None:
    said = {**holding(FOUR), C: Evidence()}
    assert found(judge(a_plan(*FOUR), dict.fromkeys(FOUR, "d"), said)) == {((C,), "out")}


def test_sender_of_what_is_no_number_is_kept_from_who_noticed_it_at_once() -> None:
    said: dict[str, Evidence] = {A: Evidence(refused=(B,)), B: Evidence(), C: Evidence(), D: Evidence()}
    assert found(judge(a_plan(*FOUR), {}, said)) == {((A, B), "apart")}
    assert found(judge(a_plan(*FOUR), {}, {**said, D: Evidence(refused=(B,))})) == {((B,), "out")}


def test_different_results_of_gloo_are_the_fewest_members_fault_in_the_end() -> None:
    said, votes = dict.fromkeys(FOUR, Evidence()), {**dict.fromkeys(FOUR, "d"), C: "odd"}
    acts = [judge(a_plan(*FOUR, retries=n), votes, said) for n in (0, TOLERATED_RETRIES)]
    assert [found(blames) for blames in acts] == [{((C,), "named")}, {((C,), "out")}]


# -- what does not come ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("retries", "consequence"), [(0, "named"), (1, "named"), (TOLERATED_RETRIES, "out")])
def test_who_withholds_its_contribution_from_all_is_named_and_not_those_who_wait(
    retries: int, consequence: str
) -> None:
    others = {m: Evidence(lacks=(D,), lacks_mean=tuple({A, B, C} - {m})) for m in (A, B, C)}
    said = {**others, D: Evidence(lacks_mean=(A, B, C))}
    assert found(judge(a_plan(*FOUR, retries=retries), {}, said)) == {((D,), consequence)}


def test_owner_that_could_not_know_the_mean_is_not_at_fault_for_it() -> None:
    """D withholds its contribution from A alone: all wait for A's mean, and A waits for D."""
    said = {A: Evidence(lacks=(D,)), **{m: Evidence(lacks_mean=(A,)) for m in (B, C, D)}}
    assert found(judge(a_plan(*FOUR), {}, said)) == {((A, D), "named")}


def test_owner_that_withholds_its_mean_is_at_fault() -> None:
    said = {A: Evidence(), **{m: Evidence(lacks_mean=(A,)) for m in (B, C, D)}}
    assert found(judge(a_plan(*FOUR, retries=TOLERATED_RETRIES), {}, said)) == {((A,), "out")}


def test_who_ends_a_round_that_most_had_finished_without_a_reason_is_named() -> None:
    said = {**holding(FOUR), B: Evidence()}
    votes = {A: "d", C: "d", D: "d"}
    assert found(judge(a_plan(*FOUR), votes, said, failed=f"{B}: a link broke")) == {((B,), "named")}
    assert judge(a_plan(*FOUR), votes, said, failed=f"{A}: a link broke") == ()


def test_who_says_nothing_is_named() -> None:
    said = {m: Evidence() for m in (A, B, C)}
    assert found(judge(a_plan(*FOUR), {}, said, silent=[D])) == {((D,), "named")}


@pytest.mark.parametrize(("retries", "consequence"), [(0, "named"), (TOLERATED_RETRIES, "out")])
def test_who_does_not_vote_although_most_have_is_named(retries: int, consequence: str) -> None:
    said, votes = holding(FOUR), dict.fromkeys((A, B, D), "d")
    plan = a_plan(*FOUR, retries=retries)
    assert found(judge(plan, votes, said, failed=f"1 {NO_VOTE}")) == {((C,), consequence)}
    assert judge(plan, votes, said, failed="a link broke") == ()


def test_failure_in_which_nothing_stood_still_is_no_ones_fault() -> None:
    assert judge(a_plan(*FOUR), {}, dict.fromkeys(FOUR, Evidence())) == ()


# -- what is remembered ---------------------------------------------------------------------------------------------

LIE, GAP = (Blame((A, B), "why", is_lie, "apart", round=3) for is_lie in (True, False))


def test_lies_are_remembered_and_gaps_forgotten_after_some_rounds() -> None:
    named = Blame((C,), "why", is_lie=False, consequence="named", round=3)
    plan = a_plan(*FOUR, blames=(LIE, GAP, named))
    assert active_blames(plan, 4) == (LIE, GAP)
    assert active_blames(plan, 3 + 8) == (LIE,)
    assert active_blames(plan, 100) == (LIE,)


def test_pair_that_is_kept_apart_is_noted_once_also_as_other_members() -> None:
    again = Blame(("a#2", B), "why", is_lie=True, consequence="apart", round=9)
    assert merge_blames((LIE,), (again, GAP)) == (LIE, GAP)


@pytest.mark.parametrize(("outs", "is_barred"), [([True], True), ([False], False), ([False, False], True), ([], False)])
def test_node_comes_back_once_after_gaps_and_never_after_a_lie(outs: list[bool], is_barred: bool) -> None:
    blames = [Blame(("a#1",), "why", is_lie, "out", round) for round, is_lie in enumerate(outs)]
    assert (barring_blame(blames, "a#2") is not None) == is_barred
    assert barring_blame(blames, "ab#1") is None


def test_node_that_was_put_out_does_not_come_back_under_another_name_with_its_key() -> None:
    key, other = NodeKey(bytes(32)), NodeKey(bytes([1] * 32))
    blames = [Blame((key.new_member_id("a"),), "why", True, "out", 3)]
    assert (
        barring_blame(blames, key.new_member_id("b")) is not None
        and barring_blame(blames, other.new_member_id("a")) is not None
    )
    assert barring_blame(blames, other.new_member_id("b")) is None


def test_name_that_begins_like_that_of_another_node_bars_only_its_own() -> None:
    """A node id has no #, but whoever has the token may take any name."""
    blames = [Blame(("a#x#1",), "why", True, "out", 3)]
    assert barring_blame(blames, "a#x#2") is not None and barring_blame(blames, "a#2") is None


# -- who sits out ---------------------------------------------------------------------------------------------------


def test_of_a_pair_each_sits_out_in_turn() -> None:
    turns = [sitting_out(FOUR, (LIE,), turn, frozenset(FOUR)) for turn in range(3)]
    assert turns == [{A}, {B}, {A}]


def test_who_stands_in_most_pairs_sits_out_every_time() -> None:
    five = (*FOUR, E)
    pairs = [Blame((D, other), "why", is_lie=True, consequence="apart", round=3) for other in (A, B)]
    assert {sitting_out(five, pairs, turn, frozenset(five)) for turn in range(4)} == {frozenset({D})}


def test_who_leaves_takes_part_where_the_other_one_can_wait() -> None:
    assert {sitting_out(FOUR, (LIE,), turn, frozenset({B})) for turn in range(3)} == {frozenset({B})}


def test_no_two_that_are_kept_apart_take_part_together() -> None:
    pairs = [Blame(pair, "why", is_lie=True, consequence="apart", round=3) for pair in combinations(FOUR, 2)]
    assert all(len(FOUR) - len(sitting_out(FOUR, pairs, turn, frozenset(FOUR))) == 1 for turn in range(5))
    assert sitting_out((A, C), pairs[:1], 0, frozenset(FOUR)) == frozenset()


def test_who_refuses_a_plan_is_not_at_fault_for_what_it_did_not_send() -> None:
    others = {m: Evidence(lacks=(D,)) for m in (A, B, C)}
    said, why = {**others, D: Evidence()}, f"{D}: {REFUSED}: its weights of {A} is 2"
    assert judge(a_plan(*FOUR, retries=TOLERATED_RETRIES), {}, said, failed=why) == ()
    assert found(judge(a_plan(*FOUR, retries=TOLERATED_RETRIES), {}, said)) == {((D,), "out")}
