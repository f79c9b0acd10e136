"""Which payloads are scored, what the others' words make of them, and what members then count."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeroband.elastic.membership.records import Gain, Ready, RoundPlan, Verdict
from zeroband.elastic.membership.trust import (
    GAIN,
    RECORD,
    ScoringRule,
    gains_after,
    median_gains,
    scored_members,
    trust_of,
)

ALL = ScoringRule(rounds=1, members=99, counts=True)
FIVE = ("a#1", "b#2", "c#3", "d#4", "e#5")
GOOD, BAD = 0.8, -0.7

MemberValues = dict[str, dict[str, float | None]]
"""What each member says of each other one; who is not there says nothing."""


def verdict(
    *members: str, round: int = 7, digest: str = "d", weights: tuple[int, ...] = (), **record: object
) -> Verdict:
    return Verdict(RoundPlan(1, 1, round, members, weights or (10,) * len(members)), digest, record)


def told(after: Verdict, words: MemberValues, rule: ScoringRule = ALL) -> dict[str, float]:
    """The medians, by sender."""
    scored = scored_members(after, rule)
    ready = {
        member: Ready(after.round + 1, 10, "s", gains=tuple(said.get(sender) for sender in scored))
        for member, said in words.items()
    }
    return {gain.member: gain.ratio for gain in median_gains(after, ready, rule)}


def everybody(members: tuple[str, ...], liars: tuple[str, ...] = (), **bad: float) -> MemberValues:
    """Honest words: all are good but `bad`, by the first letter; liars turn every word round."""
    truth = {member: bad.get(member[0], GOOD) for member in members}
    return {
        member: {sender: (-ratio if member in liars else ratio) for sender, ratio in truth.items()}
        for member in members
    }


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        pytest.param(everybody(FIVE), dict.fromkeys(FIVE, GOOD), id="all honest"),
        pytest.param(everybody(FIVE, e=-1.0), {**dict.fromkeys(FIVE, GOOD), "e#5": -1.0}, id="one sends noise"),
        pytest.param(everybody(FIVE, ("e#5",)), dict.fromkeys(FIVE, GOOD), id="one tells lies of honest ones"),
        pytest.param(
            everybody(FIVE, ("d#4", "e#5"), e=BAD), {**dict.fromkeys(FIVE, GOOD), "e#5": BAD}, id="two stand together"
        ),
        pytest.param(
            {m: said for m, said in everybody(FIVE, ("d#4", "e#5")).items() if m in ("d#4", "e#5")},
            {},
            id="liars alone speak",
        ),
        pytest.param(
            {m: said for m, said in everybody(FIVE, e=BAD).items() if m in ("a#1", "b#2", "c#3")},
            {**dict.fromkeys(FIVE[3:4], GOOD), "e#5": BAD},
            id="three of five speak",
        ),
        pytest.param({m: dict.fromkeys(FIVE) for m in FIVE}, {}, id="nobody could measure"),
    ],
)
def test_gain_is_the_median_of_what_the_others_say(words: MemberValues, expected: dict[str, float]) -> None:
    assert told(verdict(*FIVE), words) == expected


def test_nobody_is_judged_by_its_own_word() -> None:
    words = everybody(FIVE, e=BAD)
    words["e#5"]["e#5"] = 1.0
    words["a#1"]["a#1"] = -1.0
    assert told(verdict(*FIVE), words) == {**dict.fromkeys(FIVE, GOOD), "e#5": BAD}


@pytest.mark.parametrize("liar", ["b#2", "c#3"])
def test_of_three_members_one_liar_pushes_nobody_out(liar: str) -> None:
    three = FIVE[:3]
    assert told(verdict(*three), everybody(three, (liar,)))["a#1"] == GOOD
    assert told(verdict(*three), everybody(three, (), c=BAD))["c#3"] == BAD


def test_of_two_members_nobody_is_scored() -> None:
    assert scored_members(verdict(*FIVE[:2]), ALL) == ()


def test_words_of_members_that_count_nothing_are_not_heard() -> None:
    three_liars = everybody(FIVE, ("c#3", "d#4", "e#5"))
    assert told(verdict(*FIVE), three_liars)["a#1"] == -GOOD
    after = verdict(*FIVE, **{RECORD: {"d#4": -1.0, "e#5": -1.0}})
    assert told(after, three_liars)["a#1"] == GOOD


def test_words_of_another_length_and_of_strangers_do_not_count() -> None:
    after = verdict(*FIVE[:3])
    ready = {m: Ready(8, 10, "s", gains=(BAD,)) for m in FIVE[:3]} | {
        m: Ready(8, 10, "s", gains=(BAD,) * 3) for m in FIVE[3:]
    }
    assert median_gains(after, ready, ALL) == ()


def test_lot_takes_one_round_of_so_many_and_so_many_senders() -> None:
    rule = ScoringRule(rounds=8, members=2)
    lots = [
        scored_members(verdict(*FIVE, round=r, digest=f"d{r}", weights=(10, 10, 10, 10, 0)), rule) for r in range(800)
    ]
    assert 60 < sum(map(bool, lots)) < 140
    assert {len(lot) for lot in lots} == {0, 2}
    by_member = [sum(member in lot for lot in lots) for member in FIVE]
    assert min(by_member[:4]) > 20 and by_member[4] == 0


def test_nothing_is_drawn_without_a_rule_or_where_the_run_goes_back() -> None:
    assert scored_members(verdict(*FIVE), None) == () and scored_members(None, ALL) == ()
    after = verdict(*FIVE)
    assert scored_members(replace(after, plan=replace(after.plan, rollback=10)), ALL) == ()


def plan(**gains: float) -> RoundPlan:
    told = tuple(Gain(next(m for m in FIVE if m[0] == name), ratio) for name, ratio in gains.items())
    return RoundPlan(1, 1, 8, FIVE, (10,) * 5, gains=told)


def weights_after(*plans: RoundPlan) -> list[float]:
    """What e counts after each of these rounds, however well it agreed."""
    record: dict[str, object] = {RECORD: {"e#5": 0.9}}
    weights: list[float] = []
    for made in plans:
        record[GAIN] = gains_after(record, made)
        weights.append(trust_of(("e#5",), record)[0])
    return weights


def test_member_whose_payloads_raise_the_loss_counts_nothing_after_some_scores() -> None:
    scored = plan(a=GOOD, b=GOOD, e=-1.0)
    assert weights_after(*[scored] * 5) == pytest.approx([1.0, 1.0, 0.822, 0.640, 0.0], abs=0.001)
    assert weights_after(*[scored, plan()] * 5)[-1] == 0.0, "rounds without scores change nothing"


def test_member_whose_payloads_are_as_those_of_most_is_trusted_when_nobody_learns() -> None:
    assert weights_after(*[plan(a=-0.8, b=-0.7, e=-0.9)] * 99)[-1] == 1.0
    assert weights_after(*[plan(a=-0.1, b=0.1, e=-0.9)] * 99)[-1] == 0.0


def test_member_that_counts_nothing_is_tried_again() -> None:
    record: dict[str, object] = {GAIN: {"a#1": 0.5, "e#5": -0.6}}
    for _ in range(50):
        record[GAIN] = gains_after(record, plan(a=GOOD, b=GOOD))
    assert 0.5 < trust_of(("e#5",), record)[0] < 0.6
