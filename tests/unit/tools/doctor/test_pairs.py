"""Who measures with whom, and what is said of a pair."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.tools.doctor.pairs import MET, PairFinding, partners


@given(st.integers(1, 17))
def test_everybody_meets_everybody_once_and_has_one_partner_at_a_time(members: int) -> None:
    names = [f"n{i:02}" for i in range(members)]
    meetings = {name: partners(names, name) for name in names}
    for name, turns in meetings.items():
        assert sorted(other for _, other in turns) == [other for other in names if other != name]
        assert len({turn for turn, _ in turns}) == len(turns) and [t for t, _ in turns] == sorted(t for t, _ in turns)
        assert all((turn, name) in meetings[other] for turn, other in turns)


@pytest.mark.parametrize(
    ("reached", "mbit", "advice"),
    [
        ((True, True), 100.0, ""),
        ((False, True), None, "1.2.3.4:5 does not answer: open its port"),
        ((True, False), None, "it cannot reach this node: open node.port here"),
        ((True, True), None, "are run.token and comm.encryption the same"),
    ],
)
def test_what_is_wrong_with_a_pair_comes_with_what_to_do(
    reached: tuple[bool, bool], mbit: float | None, advice: str
) -> None:
    found = PairFinding("b", "1.2.3.4:5", *reached, rtt_ms=1.0, mbit=mbit)
    assert advice in found.advice and bool(found.advice) == bool(advice)


@pytest.mark.parametrize(
    ("reached", "way", "said"),
    [
        ((True, True), "direct", "direct"),
        ((True, True), "reversed", "reversed: it dials this node"),
        ((True, True), "c", "through c"),
        ((True, True), MET, "direct: both dial at once"),
        ((True, False), "direct", "cut off"),
    ],
)
def test_pair_says_which_way_it_goes(reached: tuple[bool, bool], way: str, said: str) -> None:
    assert PairFinding("b", "1.2.3.4:5", *reached, way=way).way_taken == said
