"""Several members through many rounds, in any order of events: the production rules on a real Redis, no clock.

hypothesis chooses who looks at the store when, and how old the look is on which somebody acts. Time passes where a
rule says so: what the clock of a lease would do is written into the store.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from tests.unit.elastic.rounds.rounds_machine import LEASE_S, Run

from zeroband.elastic.membership.orders import pause, resume
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND

NODES, FOUNDERS = 4, 3
SLOT = st.integers(0, NODES - 1)
ORDER = st.lists(SLOT, min_size=4, max_size=24)


class Rounds(RuleBasedStateMachine):
    """One run. Every rule is an event that production can have at that moment."""

    url: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.run = Run(self.url)
        self.copy: dict[bytes, bytes] | None = None
        """What the store holds on its disk."""

    # -- what nodes do in time ----------------------------------------------------------------------------------

    @initialize(is_founded=st.booleans())
    def found(self, is_founded: bool) -> None:
        for slot in range(FOUNDERS):
            self.run.start_node(slot)
        for _ in range(6 if is_founded else 0):
            self.run.all_act()

    @rule(order=ORDER)
    def act(self, order: list[int]) -> None:
        """Time passes: nodes take their steps in this order."""
        self.run.act_in(order)

    @rule()
    def all_act(self) -> None:
        self.run.all_act()

    @rule(order=ORDER, slot=SLOT)
    def start(self, order: list[int], slot: int) -> None:
        self.run.act_in(order)
        self.run.start_node(slot)

    @rule(order=ORDER, slot=SLOT)
    def leave(self, order: list[int], slot: int) -> None:
        """A node is asked to leave: it hands over what it learns in this round, and takes no more."""
        self.run.act_in(order)
        if slot in self.run.nodes:
            self.run.nodes[slot].is_leaving = True

    @rule(order=ORDER, slot=SLOT, is_lease_released=st.booleans())
    def die(self, order: list[int], slot: int, is_lease_released: bool) -> None:
        """SIGKILL: with a living guardian the lease ends at once, with the whole machine it runs out later."""
        self.run.act_in(order)
        node = self.run.nodes.pop(slot, None)
        if node is not None and is_lease_released:
            self.run.store.release_lease(node.id)

    @rule(order=ORDER, slot=SLOT, later=ORDER)
    def member_is_late(self, order: list[int], slot: int, later: list[int]) -> None:
        """It does nothing for a while, and those who wait for it lose their patience."""
        self.run.act_in([other for other in order if other != slot])
        for other in [n for n in self.run.nodes.values() if n.slot != slot and n.phase == "waiting"]:
            self.run.step(other, straggler_deadline_s=0.0)
        self.run.act_in([other for other in later if other != slot])

    @rule()
    def founders_stop_waiting(self) -> None:
        self.run.start_is_over = True

    @rule(order=ORDER, later=ORDER, goes_on=st.booleans())
    def operator_pauses_the_run(self, order: list[int], later: list[int], goes_on: bool) -> None:
        """A round that is open comes to its end, and no other one is opened."""
        self.run.act_in(order)
        self.run.store.give_orders(pause)
        plan = self.run.store.view(BOOTSTRAP_ROUND).plan
        self.run.act_in(later)
        assert self.run.store.view(BOOTSTRAP_ROUND).plan == plan, "opened in a pause"
        if goes_on:
            self.run.store.give_orders(resume)

    # -- leases and links ---------------------------------------------------------------------------------------

    @rule(order=ORDER, slot=SLOT, later=st.lists(SLOT, max_size=5))
    def lease_runs_out_and_is_renewed(self, order: list[int], slot: int, later: list[int]) -> None:
        self.run.act_in(order)
        if slot in self.run.nodes:
            self.run.store.expire_lease(self.run.nodes[slot].id)
        self.run.act_in(later)
        if slot in self.run.nodes:
            self.run.renew(self.run.nodes[slot])

    @rule(order=ORDER)
    def leases_of_the_dead_run_out(self, order: list[int]) -> None:
        self.run.act_in(order)
        self.run.bury_the_dead()

    @rule(order=ORDER, later=ORDER)
    def store_is_out_of_reach_for_long(self, order: list[int], later: list[int]) -> None:
        """Nobody renews meanwhile; nobody who held a lease may lose it by that."""
        self.run.act_in(order)
        alive = self.run.store.view(BOOTSTRAP_ROUND).alive
        self.run.set_clock_forward(int(5000 * LEASE_S))
        assert self.run.store.view(BOOTSTRAP_ROUND).alive == alive
        self.run.act_in(later)
        for node in self.run.nodes.values():
            self.run.renew(node)
            assert node.id not in alive or not node.is_fenced, f"{node.id} was fenced by a silence"

    @rule(order=ORDER, one=SLOT, other=SLOT, is_mutual=st.booleans())
    def link_is_cut(self, order: list[int], one: int, other: int, is_mutual: bool) -> None:
        self.run.act_in(order)
        if one != other:
            self.run.cuts |= {(one, other), (other, one)} if is_mutual else {(one, other)}
            self.run.renew_all()

    @rule(order=ORDER)
    def links_heal(self, order: list[int]) -> None:
        self.run.act_in(order)
        self.run.cuts.clear()
        self.run.renew_all()

    # -- what goes wrong in a round -----------------------------------------------------------------------------

    @rule(order=ORDER, slot=SLOT, later=ORDER)
    def look_and_act_later(self, order: list[int], slot: int, later: list[int]) -> None:
        """A node decides on what it saw a while ago."""
        self.run.act_in(order)
        if slot in self.run.nodes:
            node = self.run.nodes[slot]
            node.seen = node.member.look(node.next_round)
            self.run.act_in([other for other in later if other != slot])
            self.run.step(node)

    @rule(order=ORDER, slot=SLOT, later=ORDER)
    def proposal_comes_late(self, order: list[int], slot: int, later: list[int]) -> None:
        self.run.act_in(order)
        if slot in self.run.nodes:
            self.run.store.is_slow = True
            self.run.step(self.run.nodes[slot])
            self.run.store.is_slow = False
            self.run.act_in(later)
            self.run.store.deliver()

    @rule(order=ORDER, data=st.data())
    def proposal_comes_twice(self, order: list[int], data: st.DataObject) -> None:
        self.run.act_in(order)
        if self.run.store.proposed and not self.run.has_lost_data:
            assert not self.run.store.propose(data.draw(st.sampled_from(self.run.store.proposed)))

    @rule(order=ORDER, slot=SLOT)
    def transfer_breaks(self, order: list[int], slot: int) -> None:
        self.run.act_in(order)
        if (node := self.run.in_phase("reducing", slot)) is not None:
            self.run.give_up(node, "a lane broke")

    @rule(order=ORDER, slot=SLOT)
    def node_computes_wrongly(self, order: list[int], slot: int) -> None:
        """Until it is left out, or the round is committed without another result."""
        self.run.act_in(order)
        if slot in self.run.nodes:
            self.run.nodes[slot].is_faulty = True

    @rule(order=ORDER, slot=SLOT)
    def update_is_not_finite(self, order: list[int], slot: int) -> None:
        self.run.act_in(order)
        if (node := self.run.in_phase("training", slot)) is not None:
            node.is_finite = False

    # -- the store loses what it held ---------------------------------------------------------------------------

    @rule(order=ORDER, looks=st.permutations(range(NODES)), later=ORDER)
    def store_comes_back_empty(self, order: list[int], looks: list[int], later: list[int]) -> None:
        self.run.act_in(order)
        self.run.client.flushdb()
        self.run.after_a_loss(looks, later)

    @rule(order=ORDER)
    def store_writes_to_its_disk(self, order: list[int]) -> None:
        self.run.act_in(order)
        names = list(self.run.client.scan_iter(f"{self.run.store.keys.prefix}:*"))
        self.copy = {name: self.run.client.dump(name) or b"" for name in names}

    @rule(order=ORDER, looks=st.permutations(range(NODES)), later=ORDER)
    def store_comes_back_with_what_was_on_its_disk(self, order: list[int], looks: list[int], later: list[int]) -> None:
        self.run.act_in(order)
        if self.copy is not None:
            self.run.client.flushdb()
            for name, value in self.copy.items():
                self.run.client.restore(name, 30_000_000, value)
            self.run.after_a_loss(looks, later)

    # -- what must hold -----------------------------------------------------------------------------------------

    @invariant()
    def every_sample_has_one_place(self) -> None:
        self.run.assert_every_sample_has_one_place()

    @invariant()
    def history_of_the_store_is_in_order(self) -> None:
        self.run.assert_history_is_in_order()

    def teardown(self) -> None:
        try:
            self.run.assert_rounds_follow_again_once_faults_end()
        finally:
            self.run.close()


def run_machine(url: str, examples: int, **options: Any) -> None:
    Rounds.url = url
    run_state_machine_as_test(
        Rounds,
        settings=settings(
            max_examples=examples,
            stateful_step_count=25,
            phases=[Phase.generate],  # add Phase.shrink to understand a failure; it takes minutes
            deadline=None,
            suppress_health_check=tuple(HealthCheck),
            database=None,
            **options,
        ),
    )


@pytest.mark.slow
def test_members_commit_one_line_of_rounds_whatever_happens(redis_url: str) -> None:
    run_machine(redis_url, 15, derandomize=True)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_members_commit_one_line_of_rounds_in_thousands_of_runs(redis_url: str) -> None:
    run_machine(redis_url, 3000)
