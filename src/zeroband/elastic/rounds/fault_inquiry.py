"""A member's testimony on failed plans, the testimony that it collects, and its check of another member's findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zeroband.elastic.membership.blame import findings_before, objection
from zeroband.elastic.membership.records import Attempt, Evidence, RoundPlan, Verdict, View
from zeroband.elastic.membership.round_rules import AttemptFindings
from zeroband.elastic.store.interface import Store

_SLACK = 0.9
"""Tolerance for two machines that time the same wait: one clock may run slower by this factor."""


class _Testimony(NamedTuple):
    """This member's testimony on a plan, and the time at which it was first sent."""

    plan: RoundPlan
    evidence: Evidence
    since_s: float


class FaultInquiry:
    """One member's part in finding the member at fault.

    `limit_s`: time after the newest testimony at which the wait for missing ones ends.
    """

    def __init__(self, store: Store, member_id: str, clock: Callable[[], float], limit_s: float) -> None:
        self.attempt: Attempt | None = None
        """The failed plan and its testimony, as last read."""
        self._store = store
        self._member_id = member_id
        self._clock = clock
        self._limit_s = limit_s
        self._saw: tuple[RoundPlan | None, Evidence] = None, Evidence()
        self._said: dict[str, _Testimony] = {}
        """Own testimony that the store accepted since the newest verdict, by plan id."""
        self._heard: tuple[str, int] | None = None
        self._since_s = 0.0
        self._begun = ""
        self._newest: RoundPlan | None = None
        """The plan that was checked last."""
        self._past: dict[str, Attempt] = {}
        """Superseded attempts, by their plans' ids."""

    # -- own testimony ------------------------------------------------------------------------------------------

    def testify(self, plan: RoundPlan, evidence: Evidence) -> None:
        """Report this member's evidence on a failed plan."""
        self._saw, since_s = (plan, evidence), self._clock()
        if self._store.testify(plan, self._member_id, evidence):
            self._said.setdefault(plan.id, _Testimony(plan, evidence, since_s))

    def begin(self, plan: RoundPlan) -> None:
        """Make sure that the store has this member's testimony."""
        if self._begun != plan.id:
            self._begun = plan.id
            self._testify_again(plan)

    def _testify_again(self, plan: RoundPlan) -> None:
        """Testify if the store does not show it; the evidence is empty if this member did not run the plan.

        A plan may fail before all of its members know of it, and a store may lose records.
        """
        if self._member_id in plan.members:
            self.testify(plan, self._saw[1] if self._saw[0] == plan else Evidence())

    # -- the members' testimony ---------------------------------------------------------------------------------

    def __call__(self, view: View) -> AttemptFindings:
        """Findings on the current plan, which was not committed."""
        plan, now_s = view.plan, self._clock()
        assert plan is not None
        attempt = self.attempt = self._store.attempt(plan.id) or Attempt(plan, view.votes, {}, view.failed or "")
        said = attempt.evidence
        if self._member_id not in said and view.failed is not None:
            self._testify_again(plan)
        if self._heard != (plan.id, len(said)):
            self._heard, self._since_s = (plan.id, len(said)), now_s
        before = findings_before(plan, self._attempts_before(plan, view.committed), view.committed)
        return AttemptFindings(attempt, before, now_s - self._since_s > self._limit_s)

    def _attempts_before(self, plan: RoundPlan, committed: Verdict | None) -> tuple[Attempt, ...]:
        """Attempts between the newest verdict and a plan, oldest first, as far as the store still has them."""
        last, found = "" if committed is None else committed.plan.id, list[Attempt]()
        while plan.before not in ("", last):
            attempt = self._past.get(plan.before) or self._store.attempt(plan.before)
            if attempt is None or attempt.plan.version >= plan.version:
                break
            found.append(attempt)
            plan = attempt.plan
        self._past = {attempt.plan.id: attempt for attempt in found}
        return tuple(reversed(found))

    def is_of(self, plan: RoundPlan | None) -> bool:
        """Whether `attempt` is of this plan."""
        return self.attempt is not None and self.attempt.plan == plan

    # -- checking another member's findings ---------------------------------------------------------------------

    def objection(self, plan: RoundPlan, committed: Verdict | None) -> str | None:
        """Why a plan's findings do not follow from the attempts before it; None: they do.

        Restores own testimony that the store has lost.
        """
        newest, self._newest = self._newest, plan
        if newest is not None and newest.version + 1 == plan.version and newest.id != plan.before:
            return f"it skips version {newest.version}, which this member has seen"
        had_seen_some = bool(self._past)
        why = self._why_not(plan, committed)
        if why is not None and had_seen_some:  # members may have restored lost testimony since
            self._past = {}
            why = self._why_not(plan, committed)
        return why

    def _why_not(self, plan: RoundPlan, committed: Verdict | None) -> str | None:
        past = self._attempts_before(plan, committed)
        return self._own_objection(plan, past) or objection(plan, past, committed)

    def _own_objection(self, plan: RoundPlan, past: tuple[Attempt, ...]) -> str | None:
        """Objection by what only this member knows: whether it testified, and when."""
        self._said = {id: word for id, word in self._said.items() if id in {a.plan.id for a in past}}
        for attempt in past:
            word = self._said.get(attempt.plan.id)
            if word is not None and self._member_id not in attempt.evidence:
                self._store.testify(word.plan, self._member_id, word.evidence, again=True)
                return f"what {self._member_id} testified on version {word.plan.version} is not there any more"
        word = self._said.get(plan.before)
        if word is not None and plan.silent:
            waited_s = self._clock() - word.since_s
            if waited_s < _SLACK * self._limit_s:
                silent = ", ".join(plan.silent)
                return f"it calls {silent} silent after {waited_s:.2f} s, and members have {self._limit_s:.2f} s"
        return None
