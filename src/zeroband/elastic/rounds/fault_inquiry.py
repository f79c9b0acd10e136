"""What a member testifies and hears of plans that failed, and how it checks what another one makes of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from zeroband.elastic.membership.findings import found_before, objection
from zeroband.elastic.membership.records import Attempt, Evidence, RoundPlan, Verdict, View
from zeroband.elastic.membership.round_rules import AttemptFindings
from zeroband.elastic.store.interface import Store

_SLACK = 0.9
"""Two machines' clocks count the same wait; one may go slower by so much."""


class _Testimony(NamedTuple):
    """What this member testified on a plan, and when it began to say so."""

    plan: RoundPlan
    evidence: Evidence
    since_s: float


class FaultInquiry:
    """One member's part in finding out who was at fault.

    `limit_s`: so long after the newest word those who have not testified are waited for no more.
    """

    def __init__(self, store: Store, member_id: str, clock: Callable[[], float], limit_s: float) -> None:
        self.attempt: Attempt | None = None
        """The failed plan, as it was heard last."""
        self._store = store
        self._member_id = member_id
        self._clock = clock
        self._limit_s = limit_s
        self._saw: tuple[RoundPlan | None, Evidence] = None, Evidence()
        self._said: dict[str, _Testimony] = {}
        """Words that the store took, since the newest verdict, by plan."""
        self._heard: tuple[str, int] | None = None
        self._since_s = 0.0
        self._begun = ""
        self._newest: RoundPlan | None = None
        """The one that was checked last."""
        self._past: dict[str, Attempt] = {}
        """Attempts that others have followed, by their plans' ids."""

    # -- what it says -------------------------------------------------------------------------------------------

    def testify(self, plan: RoundPlan, evidence: Evidence) -> None:
        """Say what this member saw of a plan that failed."""
        self._saw, since_s = (plan, evidence), self._clock()
        if self._store.testify(plan, self._member_id, evidence):
            self._said.setdefault(plan.id, _Testimony(plan, evidence, since_s))

    def begin(self, plan: RoundPlan) -> None:
        """Have this member's own word be there."""
        if self._begun != plan.id:
            self._begun = plan.id
            self._testify_again(plan)

    def _testify_again(self, plan: RoundPlan) -> None:
        """Testify where the store does not show it. A member that was not asked yet saw nothing.

        A plan may fail before all of its members know of it, and a store may lose what it was told.
        """
        if self._member_id in plan.members:
            self.testify(plan, self._saw[1] if self._saw[0] == plan else Evidence())

    # -- what it hears ------------------------------------------------------------------------------------------

    def __call__(self, view: View) -> AttemptFindings:
        """What is known of the current plan, which was not committed."""
        plan, now_s = view.plan, self._clock()
        assert plan is not None
        attempt = self.attempt = self._store.attempt(plan.id) or Attempt(plan, view.votes, {}, view.failed or "")
        said = attempt.said
        if self._member_id not in said and view.failed is not None:
            self._testify_again(plan)
        if self._heard != (plan.id, len(said)):
            self._heard, self._since_s = (plan.id, len(said)), now_s
        before = found_before(plan, self._attempts_before(plan, view.committed), view.committed)
        return AttemptFindings(attempt, before, now_s - self._since_s > self._limit_s)

    def _attempts_before(self, plan: RoundPlan, committed: Verdict | None) -> tuple[Attempt, ...]:
        """The attempts since the newest verdict that a plan follows on, oldest first, if not lost."""
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
        """Whether `attempt` is this plan's."""
        return self.attempt is not None and self.attempt.plan == plan

    # -- what it checks -----------------------------------------------------------------------------------------

    def objection(self, plan: RoundPlan, committed: Verdict | None) -> str | None:
        """Say what a plan says of the ones before it that does not follow; None: all of it does.

        What this member testified and the store has lost is brought back.
        """
        newest, self._newest = self._newest, plan
        if newest is not None and newest.version + 1 == plan.version and newest.id != plan.before:
            return f"it does not follow on version {newest.version}, as this member saw that"
        had_seen_some = bool(self._past)
        why = self._why_not(plan, committed)
        if why is not None and had_seen_some:  # members may have brought back since what was lost of them
            self._past = {}
            why = self._why_not(plan, committed)
        return why

    def _why_not(self, plan: RoundPlan, committed: Verdict | None) -> str | None:
        past = self._attempts_before(plan, committed)
        return self._own_objection(plan, past) or objection(plan, past, committed)

    def _own_objection(self, plan: RoundPlan, past: tuple[Attempt, ...]) -> str | None:
        """What only this member knows: that it testified, and when."""
        self._said = {id: word for id, word in self._said.items() if id in {a.plan.id for a in past}}
        for attempt in past:
            word = self._said.get(attempt.plan.id)
            if word is not None and self._member_id not in attempt.said:
                self._store.testify(word.plan, self._member_id, word.evidence, again=True)
                return f"what {self._member_id} testified on version {word.plan.version} is not there any more"
        word = self._said.get(plan.before)
        if word is not None and plan.silent:
            waited_s = self._clock() - word.since_s
            if waited_s < _SLACK * self._limit_s:
                silent = ", ".join(plan.silent)
                return f"it calls {silent} silent after {waited_s:.2f} s, and members have {self._limit_s:.2f} s"
        return None
