import threading
from dataclasses import replace

import pytest

from zeroband.elastic.membership.records import Opening, RestartPoint, Verdict, View
from zeroband.elastic.recovery.donors import Donor, Refusal
from zeroband.elastic.recovery.election import ask_all, elect, no_donor_in
from zeroband.elastic.recovery.state_chunks import StateManifest
from zeroband.errors import RecoveryFailed

A, B, C, D = (Donor(name, "127.0.0.1", port) for port, name in enumerate("abcd", start=1))
HONEST = StateManifest(3, "honest", {}, 4, {"params": 4}, {"params": ("p0",)})
LIE = replace(HONEST, state_digest="lie")


def test_claim_of_most_donors_is_believed_whoever_comes_first() -> None:
    believed = elect({A: LIE, B: HONEST, C: HONEST})
    assert believed.manifest == HONEST
    assert believed.supporters == (B, C)
    assert believed.dropped == {"a": "its state_digest is 'lie', the others' is 'honest'"}
    assert believed.spare([A, B, C, D]) == [D]


def test_donor_that_comes_first_decides_between_equal_groups() -> None:
    assert elect({A: LIE, B: HONEST}).manifest == LIE
    assert elect({A: HONEST, B: LIE}).manifest == HONEST


def test_liars_with_different_lies_do_not_add_up() -> None:
    believed = elect({A: LIE, B: replace(LIE, state_digest="another lie"), C: HONEST, D: HONEST})
    assert believed.manifest == HONEST
    assert set(believed.dropped) == {"a", "b"}


def test_donor_that_refuses_is_replaced_by_the_next() -> None:
    asked: list[Donor] = []

    def ask(donor: Donor) -> StateManifest | Refusal:
        asked.append(donor)
        return Refusal("gone") if donor in (A, B) else HONEST

    poll = ask_all([A, B, C, D], 1, ask)
    assert poll.claims == {C: HONEST}
    assert set(poll.refusals) == {A, B}
    assert asked == [A, B, C]


def test_claims_are_in_the_order_of_the_donors_not_of_their_answers() -> None:
    answered = threading.Event()

    def ask(donor: Donor) -> StateManifest:
        if donor == A:
            assert answered.wait(5)
            return LIE
        answered.set()
        return HONEST

    assert list(ask_all([A, B], 2, ask).claims) == [A, B]


def test_donor_whose_answer_changes_nothing_is_not_waited_for() -> None:
    go_on = threading.Event()

    def ask(donor: Donor) -> StateManifest:
        if donor == A:
            go_on.wait(5)
        return HONEST

    assert set(ask_all([A, B, C], 3, ask).claims) == {B, C}
    go_on.set()


def test_fault_of_this_node_while_it_asks_is_a_refusal_not_a_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)

    def ask(donor: Donor) -> StateManifest:
        raise AssertionError("a fault")

    assert ask_all([A], 3, ask).refusals == {A: Refusal("this node failed to ask it")}


def test_nobody_to_ask_is_no_answer() -> None:
    poll = ask_all([], 3, lambda donor: HONEST)
    assert (poll.claims, poll.refusals) == ({}, {})


def opened(*members: str) -> Opening:
    zeros = tuple(0 for _ in members)
    return Opening(1, 1, 0, members, zeros, zeros, zeros, ())


@pytest.mark.parametrize(
    ("view", "said"),
    [
        (View(None, None, frozenset(), {}, {}, None), "no member is alive"),
        (View(opened("a#1"), None, frozenset({"a#1", "j#1"}), {}, {}, None), "not committed yet; alive: a$"),
        (View(None, Verdict(opened("a#1"), "d"), frozenset({"j#1"}), {}, {}, None), "no member is alive"),
        (View(None, Verdict(opened("a#1"), "d"), frozenset({"a#1"}), {}, {}, None), "members serve none yet: a$"),
        (
            View(None, None, frozenset({"a#1"}), {}, {}, None, restart_point=RestartPoint(5, 40, "s", "a#1")),
            "a still takes over the checkpoint of step 40",
        ),
    ],
)
def test_who_has_no_donor_is_told_what_those_who_live_do(view: View, said: str) -> None:
    with pytest.raises(RecoveryFailed, match=f"no state to join with yet: .*{said}"):
        raise no_donor_in(view)
