"""What a soak must have seen before it may say that all held."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from zeroband.tools.chaos.judgement import Evidence, Judgement

ENOUGH = Evidence("runs/x", 9, 400, 8, 4, 60.0, 5, 4, later_rounds=7)


def test_enough_evidence_lacks_nothing_and_all_held() -> None:
    assert ENOUGH.lacking() == []
    assert (Judgement().headline, Judgement().exit_code, Judgement().lines) == ("all invariants held", 0, [])


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ({"rounds": 0, "compared": 0}, "no node recorded a round in runs/x"),
        ({"compared": 0}, "no results were compared"),
        ({"samples": 0}, "no sample was trained"),
        ({"calm_rounds": 0}, "no baseline: no whole round fell into the 60 s without faults; raise --baseline-minutes"),
        ({"struck": 0}, "no fault struck, 5 were planned"),
        ({"unseen": ("store lost",)}, "no fault struck of store lost: raise --minutes"),
        ({"later_rounds": 0}, "no round was committed after the first fault"),
        ({"complete_s": 37.2}, "the run was complete at 37 s, before the soak was over: raise train.total_steps"),
    ],
)
def test_each_missing_evidence_is_said_and_keeps_all_from_having_held(missing: dict[str, Any], said: str) -> None:
    (lacking,) = replace(ENOUGH, **missing).lacking()
    assert said in lacking
    judgement = Judgement(lacking=[lacking])
    assert (judgement.headline, judgement.exit_code) == ("NO EVIDENCE, so nothing is concluded", 3)


def test_violation_is_one_whatever_else_was_found() -> None:
    judgement = Judgement(["digest differs\n  context"], ["no baseline"], ["node1"], is_interrupted=True)
    assert (judgement.headline, judgement.exit_code) == ("1 VIOLATION", 1)
    assert judgement.lines == ["VIOLATION: digest differs", "NO EVIDENCE: no baseline", "STARVED: node1"]
