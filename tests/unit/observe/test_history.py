"""The long memory of a run: what it keeps, in which order facts may come, and what it says of them."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made_runs import BEGIN_S, committed, event, joined, member, run_of, step
from tests.made_runs import history_of as history

from zeroband.observe import history as module
from zeroband.observe.curves import Moments
from zeroband.observe.facts import Fact
from zeroband.observe.guarantees import Guarantee
from zeroband.observe.history import RunHistory
from zeroband.observe.lines import NEWEST_ROUNDS, RoundView
from zeroband.observe.view import JoinView

NODES = ("a", "b", "c")


def in_turn(runs: Iterable[list[Fact]]) -> list[Fact]:
    return [fact for fact in itertools.chain(*itertools.zip_longest(*runs)) if fact is not None]


def guarantee(made: RunHistory, key: str, at_s: float | None = None) -> Guarantee:
    return next(one for one in made.guarantees(at_s) if one.key == key)


def known(made: RunHistory, at_s: float | None = None) -> tuple[object, ...]:
    """All that it tells of a moment."""
    seen = (made.view(at_s), made.rounds(at_s), made.events(at_s), made.membership(at_s), made.links(at_s))
    return (*seen, made.checkpoints(at_s), made.guarantees(at_s), made.sample(at_s), made.from_s, made.to_s)


def standings(made: RunHistory, node_id: str) -> list[tuple[str, float, float | None]]:
    spans = made.membership()[node_id]
    return [
        (s.state, round(s.from_s - BEGIN_S, 1), None if s.to_s is None else round(s.to_s - BEGIN_S, 1)) for s in spans
    ]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_order_between_nodes_changes_nothing(order: tuple[int, ...]) -> None:
    runs = list(run_of(NODES, 30))
    made, expected = history(itertools.chain(*(runs[i] for i in order))), history(in_turn(runs))
    assert made.view() == expected.view()
    assert made.rounds() == expected.rounds()
    assert made.membership() == expected.membership()
    assert made.guarantees() == expected.guarantees()
    assert made.guarantees(BEGIN_S + 30.5) == expected.guarantees(BEGIN_S + 30.5)
    assert [s.y for s in made.series("step")] == [s.y for s in expected.series("step")]
    assert made.view().round == 30


def test_view_goes_back_in_time_and_knows_nothing_of_before_the_run() -> None:
    made = history(in_turn(run_of(NODES, 40)))
    then = made.view(BEGIN_S + 20.5)
    assert {(node.step, node.state) for node in then.nodes} == {(10, "training")}
    assert then.round == made.rounds(BEGIN_S + 20.5)[-1].round == 10
    assert made.view(BEGIN_S - 1).nodes == ()


def test_earlier_views_of_a_long_run_are_evenly_coarse() -> None:
    made = history(in_turn(run_of(("a",), 1000)))
    steps = [made.view(BEGIN_S + 2.0 * at).nodes[0].step for at in (125, 500, 990, 1000)]
    assert steps[2:] == [990, 1000]
    assert 108 <= steps[0] <= 125 and 483 <= steps[1] <= 500


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (16, 1), (17, 2), (48, 4), (10_000, 1024)])
def test_moments_keep_the_newest_values_and_evenly_spaced_ones_from_the_first(length: int, stride: int) -> None:
    moments = Moments[int](8)
    for value in range(length):
        moments.add(float(value), value)
    kept = [at for at in range(length) if moments.at(float(at)) == at]
    assert kept == sorted({*range(max(0, length - 8), length), *range(0, length, stride)})


def test_whoever_asks_in_between_gets_the_same_afterwards() -> None:
    """What is kept from one question to the next is what would be found anew."""
    facts = [
        *in_turn(run_of(NODES, 6, ahead_s=50.0)),
        *WELL_FORMED[-6:],
        committed("a", 30, 7, ("a",), late=[member("b")]),
        committed("b", 33, 8, ("a", "b")),
        event("a", 34, "checkpoint_committed", round=8, step=8, bytes=1, took_s=0.1),
        event("a", 35, "checkpoints_removed", steps=[1]),
        event("b", 36, "left", reason="asked"),
        *joined("b", 40),
        event("c", 90, "links", links=[{"to": "a#1", "mbit_s": 1, "rtt_ms": None, "is_cut_off": True}]),
        event("c", 91, "run_failed", error="no"),
        committed(
            "a", 95, 9, ("a",), progress={"founding": "2", "follows": ["line", 8], "inner_step": 8, "ledgers": {}}
        ),
        *next(run_of(("x",), 2, begin_s=200.0, line="another run's")),
    ]
    asked = RunHistory("run")
    for number, fact in enumerate(facts, 1):
        asked.add(fact)
        known(asked)
        if number > 60 or number % 20 == 0:
            for at_s in (None, BEGIN_S + 9.0):
                assert known(asked, at_s) == known(history(facts[:number]), at_s), number


def test_round_that_stays_the_same_is_the_same_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a document costs what is new, and not what there was before."""
    facts = in_turn(run_of(("a", "b"), 3 * NEWEST_ROUNDS))
    made = history(facts[:-4])
    before = made.rounds()
    views: list[object] = []
    monkeypatch.setattr(module, "RoundView", lambda **fields: views.append(RoundView(**fields)) or views[-1])
    for fact in facts[-4:]:
        made.add(fact)
    after = made.rounds()
    assert len(before) == len(after) == NEWEST_ROUNDS
    assert sum(a is b for a, b in zip(before[1:], after[:-1], strict=True)) == NEWEST_ROUNDS - 1
    assert len(views) == 1


def test_clocks_are_compared_when_somebody_asks_and_not_with_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    facts, compared = in_turn(run_of(NODES, 40)), list[object]()
    middle = module.median_low
    monkeypatch.setattr(module, "median_low", lambda times: compared.append(times) or middle(times))
    made = history(facts)
    assert compared == []
    made.rounds(), made.events()
    assert len(compared) == 41  # each common round once


def test_everything_of_an_earlier_moment_is_as_it_was_known_then() -> None:
    link, at_s = {"to": member("b"), "mbit_s": 30, "rtt_ms": 2.5, "is_cut_off": False}, BEGIN_S + 20.5
    facts = [
        *(fact for facts in run_of(NODES, 15) for fact in facts),
        event("a", 3, "links", links=[link]),
        step("a", 7, 3, train__mfu=0.5, node__rss_bytes=7),
        event("a", 8, "checkpoint_committed", round=3, step=3, bytes=1, took_s=0.1),
        event("a", 9, "sample_written", path="sample.txt", text="Once"),
        event("a", 24.5, "checkpoint_committed", round=12, step=12, bytes=1, took_s=0.1),
        event("a", 24.6, "checkpoints_removed", steps=[3]),
        event("a", 25, "links", links=[{**link, "is_cut_off": True}]),
        event("a", 25.5, "peer_lost", round=13, member_ids=[member("c")]),
        step("a", 27, 13, train__mfu=0.1, node__rss_bytes=9),
        event("a", 28, "sample_written", path="sample.txt", text="upon"),
        event("a", 29, "checkpoint_failed", round=14, step=14, reason="disk full"),
    ]
    facts.sort(key=lambda fact: fact.record["at_s"])
    made, then = history(facts), history(fact for fact in facts if fact.record["at_s"] <= at_s)
    assert known(made, at_s)[1:-1] == known(then, at_s)[1:-1]
    assert [(n.step, n.mfu, n.memory_bytes) for n in made.view(at_s).nodes] == [
        (n.step, n.mfu, n.memory_bytes) for n in then.view().nodes
    ]
    assert (made.view(at_s).nodes[0].mfu, made.view().nodes[0].mfu) == (0.5, 0.1)
    assert [made.links(at)["a"][0].is_cut_off for at in (at_s, None)] == [False, True]
    assert [one.step for one in (*made.checkpoints(at_s), *made.checkpoints())] == [3, 12]
    assert [guarantee(made, "checkpoint", at).state for at in (BEGIN_S + 7, at_s, None)] == ["unknown", "good", "bad"]
    assert [guarantee(made, "detection", at).state for at in (at_s, None)] == ["unknown", "good"]
    assert "10 rounds checked" in guarantee(made, "ledger", at_s).evidence[0]
    assert "11 rounds recorded" in guarantee(made, "divergence", at_s).evidence[0]
    assert made.sample(BEGIN_S + 8) is None
    assert [one and one.fields["text"] for one in (made.sample(at_s), made.sample())] == ["Once", "upon"]


def test_what_was_checked_before_the_rounds_that_are_kept_is_not_known_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("zeroband.observe.guarantees.KEPT_DIGESTS", 16)
    made = history(in_turn(run_of(("a", "b"), 100)))
    assert [guarantee(made, key).state for key in ("divergence", "ledger")] == ["good", "good"]
    assert "101 rounds" in guarantee(made, "divergence").evidence[0]
    for key in ("divergence", "ledger"):
        early = guarantee(made, key, BEGIN_S + 50)
        assert (early.state, "no longer known" in early.words) == ("unknown", True)
    assert "96 rounds" in guarantee(made, "divergence", BEGIN_S + 190.5).evidence[0]


def test_another_run_of_the_same_name_is_not_mixed_with_this_one() -> None:
    first = list(run_of(("a", "b"), 40, line="first"))
    second = list(run_of(("c", "d"), 10, begin_s=20.0, line="second"))
    made = history(in_turn([*first, *second]))
    view = made.view()
    assert [node.node_id for node in view.current] == ["c", "d"]
    assert [node.node_id for node in view.foreign_nodes] == ["a", "b"]
    assert (view.round, made.rounds()[-1].round, len(made.rounds())) == (10, 10, 11)
    assert max(made.series("step")[0].x) == 10
    assert "11 rounds" in guarantee(made, "divergence").evidence[0]


def test_run_that_went_on_from_a_checkpoint_is_the_same_run() -> None:
    follows = {"founding": "second", "follows": ["first", 5], "inner_step": 5, "ledgers": {}}
    facts = [*in_turn(run_of(NODES, 8, line="first"))]
    facts += [committed(n, 30, 6, ("a", "b"), progress=follows) for n in ("a", "b")]
    made = history(facts)
    assert made.view().foreign_nodes == ()
    assert [view.round for view in made.rounds()][-3:] == [7, 8, 6]


def test_clock_a_day_off_is_corrected_by_common_rounds() -> None:
    made = history(in_turn(run_of(NODES, 20, ahead_s=86_400.0)))
    assert made.offsets() == {"c": 86_400.0}
    assert made.to_s == pytest.approx(BEGIN_S + 40.0)
    assert standings(made, "c")[-1] == ("training", 0.1, None)
    assert {round(part.end_s - BEGIN_S) for part in made.rounds()[-1].nodes.values()} == {40}


def test_rounds_say_where_the_seconds_went() -> None:
    newest = history(in_turn(run_of(NODES, 5))).rounds()[-1]
    part = newest.nodes["b"]
    assert (newest.round, newest.rounds, newest.members) == (5, 1, 3)
    assert (part.compute_s, part.wait_s, part.transfer_s, part.apply_s) == (0.4, 0.3, 0.2, 0.1)


def test_older_rounds_are_means_of_neighbours() -> None:
    made = history(in_turn(run_of(("a", "b"), 3 * NEWEST_ROUNDS)))
    views = made.rounds(most=10**6)
    assert sum(view.rounds for view in views) == 3 * NEWEST_ROUNDS + 1
    assert [view.rounds for view in views[-NEWEST_ROUNDS:]] == [1] * NEWEST_ROUNDS
    assert len(views) <= 2 * NEWEST_ROUNDS
    assert views[1].nodes["a"].compute_s == pytest.approx(0.4)


IN = ("training", 0.1)
FENCED = {"round": 3, "reason": "the run went on without it"}
BACK = event("b", 30, "joined", member_id="b#2", round=5)
LOST = [*joined("a", 0), event("a", 9, "peer_lost", round=3, member_ids=[member("b")])]
ON_ITS_WAY = "a node on its way back is lost only if that was told afterwards"


@pytest.mark.parametrize(
    ("a", "b", "stood"),
    [
        pytest.param(
            LOST,
            [event("b", 20, "node_started", total_steps=9), BACK],
            [(*IN, 9.0), ("lost", 9.0, 20.0), ("starting", 20.0, 30.0), ("training", 30.0, None)],
            id="lost member comes back",
        ),
        pytest.param(
            LOST,
            [event("b", 20, "fenced", **FENCED), BACK],
            [(*IN, 9.0), ("lost", 9.0, 20.0), ("joining", 20.0, 30.0), ("training", 30.0, None)],
            id=ON_ITS_WAY,
        ),
        pytest.param(
            LOST,
            [event("b", 8, "recovering", **FENCED), BACK],
            [(*IN, 8.0), ("joining", 8.0, 9.0), ("lost", 9.0, 30.0), ("training", 30.0, None)],
            id=f"{ON_ITS_WAY}, which it was",
        ),
        pytest.param(
            LOST,
            [event("b", 8, "left", reason="asked to leave")],
            [(*IN, 8.0), ("left", 8.0, None)],
            id="member that left is not lost",
        ),
        pytest.param(
            [*joined("a", 0), committed("a", 5, 1, ["a"], late=[member("b")])],
            [committed("b", 12, 2, ("a", "b"))],
            [(*IN, 5.0), ("late", 5.0, 12.0), ("training", 12.0, None)],
            id="late member is late until its own commit",
        ),
    ],
)
def test_node_stood_as_it_and_the_others_say_in_any_order(
    a: list[Fact], b: list[Fact], stood: list[tuple[str, float, float | None]]
) -> None:
    b = [*joined("b", 0), *b]
    for order in (a + b, b + a):
        made = history(order)
        assert standings(made, "b") == [("starting", 0.0, 0.1), *stood]
    if stood[-1][0] == "left":
        assert made.membership()["b"][-1].why == "asked to leave"


PAUSED = [*joined("a", 0), event("a", 5, "paused", round=2)]
TEN = in_turn(run_of(NODES, 10))
STALLED = event("a", 22, "transfer_stalled", round=11, waiting_for=[member("b")], since_s=10, at_byte=0,
                of_bytes=9, reason="silent")  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "at_s", "waits"),
    [
        (PAUSED, 6, ((), 5, "paused")),
        ([*PAUSED, event("a", 6, "resumed", round=2, paused_s=1)], 7, None),
        ([*TEN, step("a", 21, 11), step("b", 21, 11)], 22, None),
        ([*TEN, step("a", 21, 11), step("b", 21, 11)], 60, (("c",), 21, "behind")),
        ([*TEN, STALLED], 60, (("b",), 22, "no data")),
    ],
)
def test_run_waits_for_its_operator_for_the_silent_node_that_is_behind_or_for_whom_a_transfer_waits(
    facts: list[Fact], at_s: float, waits: tuple[tuple[str, ...], float, str] | None
) -> None:
    found = history(facts).waiting_for(BEGIN_S + at_s)
    if waits is None or found is None:
        assert found is waits
    else:
        assert (found.nodes, found.since_s - BEGIN_S) == waits[:2] and waits[2] in found.words


def test_guarantees_without_facts_are_unknown() -> None:
    assert [one.state for one in RunHistory("run").guarantees()] == ["unknown"] * 4
    lone = history(in_turn(run_of(("a",), 5)))
    assert guarantee(lone, "divergence").state == "unknown"


def test_divergence_counts_the_rounds_that_were_compared_and_is_told_of_the_moments_after_it_only() -> None:
    runs = list(run_of(NODES, 10))
    good = guarantee(history(in_turn(runs)), "divergence")
    assert good.state == "good" and "11 rounds" in good.evidence[0]
    runs[1][13] = Fact("b", {**runs[1][13].record, "digest": "other"})  # round 6, at 12 s
    made = history(in_turn(runs))
    states = [guarantee(made, "divergence", at).state for at in (BEGIN_S + 11, BEGIN_S + 12, None)]
    assert states == ["good", "bad", "bad"]
    assert guarantee(made, "divergence").evidence == ("1 of 11 compared rounds differ",)


def test_ledger_that_does_not_add_up_is_said() -> None:
    nodes = ("a", "b")
    good = history(committed("a", number, number, nodes) for number in range(6))
    assert guarantee(good, "ledger").state == "good"
    assert "5 rounds checked" in guarantee(good, "ledger").evidence[0]
    assert "40 in all" in guarantee(good, "ledger").evidence[0]
    skipped = [committed("a", n, n, nodes, **({"samples": [4, 3]} if n == 3 else {})) for n in range(6)]
    bad = guarantee(history(skipped), "ledger")
    assert (bad.state, bad.words) == ("bad", "The ledger of round 3 does not add up: 1 samples skipped.")
    no_samples = history(committed("a", n, n, nodes, samples=[0, 0], progress=None) for n in range(6))
    assert guarantee(no_samples, "ledger").state == "unknown"


def test_detection_measures_what_a_loss_cost() -> None:
    run = next(iter(run_of(NODES, 10)))
    lost = [event("a", 27, "peer_lost", round=11, member_ids=[member("c")]), committed("a", 27, 11, ("a", "b"))]
    made = history([*run, *lost])
    assert guarantee(made, "detection").state == "good"
    assert guarantee(made, "detection").words == "Losing c cost the others 5.0 s."
    slow = [replace_at(fact, 20) for fact in lost]
    assert guarantee(history([*run, *slow]), "detection").state == "bad"
    del run[0].record["detect_s"]
    assert guarantee(history([*run, *lost]), "detection").state == "unknown"


def replace_at(fact: Fact, later_s: float) -> Fact:
    return Fact(fact.node_id, {**fact.record, "at_s": fact.record["at_s"] + later_s})


def test_checkpoint_that_failed_is_said_until_the_next() -> None:
    def state_after(*kinds: str) -> str:
        return guarantee(history(
            event("a", at, kind, round=at, step=at, bytes=5, took_s=1.0, reason="disk full")
            for at, kind in enumerate(kinds, 1)
        ), "checkpoint").state  # fmt: skip

    assert state_after("checkpoint_committed") == "good"
    assert state_after("checkpoint_committed", "checkpoint_failed") == "bad"
    assert state_after("checkpoint_failed", "checkpoint_committed") == "good"
    assert state_after("checkpoint_staged") == "unknown"


def test_checkpoint_is_said_to_be_read_back_by_those_who_went_on_from_it_only() -> None:
    saved = [event("a", at, "checkpoint_committed", round=at, step=at, bytes=5, took_s=1.0) for at in (1, 2)]
    light = guarantee(history(saved), "checkpoint")
    assert light.words == "The newest checkpoint, of step 2, is committed: every file was hashed as it was written."
    assert light.evidence[-1] == "no node has loaded it yet; files are verified on loading"
    back = event("b", 5, "rolled_back", round=2, step=1, digest="d", has_inner=True, skipped={})
    older = guarantee(history([*saved, back]), "checkpoint")
    assert older.evidence[1:] == (
        "b loaded step 1, verified every file that it read, and resumed from it",
        "no node has loaded it yet; files are verified on loading",
    )
    newest = guarantee(history([*saved, Fact("b", {**back.record, "step": 2})]), "checkpoint")
    assert len(newest.evidence) == 2 and "loaded step 2" in newest.evidence[1]


def test_series_keeps_extremes_and_bounds() -> None:
    facts = [step("a", at, at, train__loss=9.0 if at == 1234 else 2.0 + at % 2 / 10) for at in range(1, 5001)]
    loss = history(facts).series("step", points=100)[0]
    assert loss.key == "loss"
    assert 50 <= len(loss.x) <= 110
    assert max(y for y in loss.y if y is not None) == 9.0
    assert list(loss.x) == sorted(loss.x)
    assert loss.x[-1] == 5000


def test_held_out_losses_of_a_long_run_keep_their_extremes_in_bounds() -> None:
    losses = {number: 9.0 if number == 1234 else 2.0 for number in range(1, 3001)}
    told = [step(n, at, at, eval__step=at, eval__loss=loss) for at, loss in losses.items() for n in ("a", "b")]
    held_out = next(one for one in history(told).series("step", points=1000) if one.key == "held_out")
    assert (held_out.x[-1], max(y for y in held_out.y if y is not None), len(held_out.x) <= 480) == (3000, 9.0, True)


def test_series_by_every_axis() -> None:
    made = history(in_turn(run_of(NODES, 10)))
    assert [max(made.series(by)[0].x) for by in ("step", "tokens", "bytes")] == [10, 1000, 300]
    assert max(made.series("time")[0].x) == BEGIN_S + 20
    by_key = {one.key: one.y for one in made.series()}
    assert by_key["tokens_per_s"][-1] == 300.0
    assert by_key["nodes"][-1] == 3


def test_round_that_one_node_records_twice_compares_nothing() -> None:
    made = history([*joined("a", 0), committed("a", 1, 1, ("a",)), committed("a", 2, 1, ("a",))])
    assert made.guarantees()[0].state == "unknown"


def test_links_of_an_ended_run_are_those_that_were_known_last() -> None:
    link = {"to": member("b"), "mbit_s": 30, "rtt_ms": 2.5, "is_cut_off": False}
    made = history([*joined("a", 0), *joined("b", 0), event("a", 1, "links", links=[link])])
    assert [(one.from_id, one.to_id, one.mbit_s) for one in made.links()["a"]] == [("a", "b", 30)]
    made.add(event("b", 2, "left", reason="done"))
    assert made.links() == {}
    made.add(event("a", 3, "run_finished", step=6))
    assert len(made.links()["a"]) == 1


def test_share_of_a_fetch_is_shown_while_a_node_joins() -> None:
    way = [
        event("a", 0, "join_state", state="fetching", why="", since=0),
        event("a", 1, "join_progress", bytes=25, of_bytes=100, bytes_per_s=5),
    ]
    assert history(way).view().nodes[0].join == JoinView("fetching", "", 0.25, 5)
    way.append(event("a", 2, "join_state", state="member", why="", since=0))
    assert history(way).view().nodes[0].join is None


def test_checkpoint_after_going_back_takes_the_place_of_the_one_before_and_removed_ones_go() -> None:
    saved = {"step": 50, "bytes": 1, "took_s": 0.1}
    made = history(event("a", at_s, "checkpoint_committed", round=n, **saved) for n, at_s in ((5, 1), (9, 2)))
    assert [one.round for one in made.checkpoints()] == [9]
    made.add(event("a", 3, "checkpoints_removed", steps=[50]))
    assert made.checkpoints() == ()


def test_tokens_of_all_nodes_count_between_two_rounds() -> None:
    """A node knows only its own tokens since the round: 2 nodes, 3 steps of 100 tokens a round, after 1000."""
    history = RunHistory("run")
    for node_id in ("a", "b"):
        for fact in joined(node_id, 0):
            history.add(fact)
        told = 1000
        for number in range(1, 7):
            own = 100 * ((number - 1) % 3 + 1)
            if number % 3:
                history.add(step(node_id, number, number, train__tokens=told + own))
            else:
                told += 600
                history.add(committed(node_id, number, number // 3, ("a", "b")))
                history.add(step(node_id, number, number, train__tokens=told, outer__nodes=2))
    loss = next(series for series in history.series("tokens") if series.key == "loss")
    assert loss.x == (1600.0, 1800.0, 2000.0, 2200.0)


def test_tokens_count_from_the_round_that_a_node_came_back_with() -> None:
    """Node b is away for round 2; what was committed meanwhile is none of what it learned since its own round."""
    history = RunHistory("run")

    def round_of(node_id: str, number: int, tokens: int) -> Fact:
        progress = {"inner_step": number, "tokens": tokens, "ledgers": {}, "founding": "line", "follows": None}
        return committed(node_id, number, number, ("a", "b"), progress=progress)

    for node_id in ("a", "b"):
        for fact in [*joined(node_id, 0), round_of(node_id, 1, 1000)]:
            history.add(fact)
        history.add(step(node_id, 1, 1, train__tokens=1000, outer__nodes=2))
    history.add(round_of("a", 2, 5000))
    history.add(step("a", 2, 2, train__tokens=5000, outer__nodes=1))
    history.add(round_of("b", 2, 5000))
    for node_id in ("a", "b"):
        history.add(step(node_id, 3, 3, train__tokens=5100))
    loss = next(series for series in history.series("tokens") if series.key == "loss")
    assert loss.x == (1000.0, 5000.0, 5200.0)


def test_series_leaves_out_what_a_rollback_superseded() -> None:
    def line(founding: str, at_s: float, numbers: range, follows: object) -> list[Fact]:
        progress = {"founding": founding, "follows": follows, "ledgers": {}}
        return [
            fact
            for number in numbers
            for fact in (
                committed("a", at_s + number, number, ("a",), progress={**progress, "inner_step": number}),
                step("a", at_s + number, number, train__loss=float(len(founding))),
            )
        ]

    facts = [*joined("a", -1), *line("1", 0, range(11), None), *line("22", 100, range(5, 8), ["1", 5])]
    loss = history(facts).series("step")[0]
    assert loss.x == (0, 1, 2, 3, 4, 5, 5, 6, 7)
    assert loss.y[-3:] == (2.0, 2.0, 2.0)
    assert history(facts).loss_curve() == (*[1.0] * 6, *[2.0] * 3)


def test_loss_that_is_no_number_is_a_gap() -> None:
    loss = history([step("a", 1, 1), step("a", 2, 2, train__loss="nan"), step("a", 3, 3)]).series("step")[0]
    assert loss.y == (4.0, None, 4.0)


def test_what_all_members_record_is_told_once() -> None:
    facts = [event(n, 1, "epoch_changed", epoch=2, members=["a#1", "b#1"]) for n in NODES]
    assert [e.kind for e in history(facts).events()] == ["epoch_changed"]


TEXT = st.text(max_size=3)
LISTS = st.lists(TEXT, max_size=3) | st.lists(st.integers(), max_size=2)
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | LISTS | st.dictionaries(TEXT, st.integers())
STALL = {"waiting_for": ["a#1"], "since_s": 1, "at_byte": 1, "of_bytes": 2}
WELL_FORMED = [
    *in_turn(run_of(("a", "b"), 3)),
    event("a", 9, "peer_lost", round=3, member_ids=["b#1"]),
    event("b", 9, "join_state", state="fetching", why="first", since=1.0),
    event("b", 9, "transfer_stalled", round=1, reason="x", **STALL),
    event("b", 9, "checkpoint_committed", round=1, step=1, bytes=3, took_s=0.1),
    event("b", 9, "sample_written", path="sample.txt", text="Once"),
    event("b", 9, "links", links=[{"to": "a#1", "mbit_s": 30, "rtt_ms": 2.5, "is_cut_off": False}]),
]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(WELL_FORMED), st.integers(0, 30), VALUES), max_size=20))
def test_no_line_raises_whatever_is_in_it(lines: list[tuple[Fact, int, object]]) -> None:
    made = RunHistory("run")
    for (node_id, record), at, value in lines:
        names = list(record)
        broken = {**record, names[at % len(names)]: value} if at else record
        made.add(Fact(node_id, broken))
    for at_s in (None, BEGIN_S + 3):
        assert made.view(at_s).run_id == "run"
        made.rounds(at_s), made.events(at_s), made.checkpoints(at_s)
        made.membership(at_s), made.guarantees(at_s), made.links(at_s), made.sample(at_s)
    made.waiting_for(BEGIN_S + 100)
    for by in ("tokens", "time", "bytes", "step"):
        assert all(len(one.x) == len(one.y) for one in made.series(by, points=10))


def test_broken_lines_are_counted() -> None:
    made = history([Fact("a", {}), Fact("a", {"at_s": "x"}), Fact("a", {"at_s": 1.0, "step": True, "kind": 3})])
    assert made.invalid_lines == 3


@pytest.mark.parametrize(
    ("rounds", "more"),
    [(1000, 1000), pytest.param(10_000, 90_000, marks=pytest.mark.soak)],
)
def test_memory_does_not_grow_with_rounds(rounds: int, more: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if rounds < 4096:
        monkeypatch.setattr("zeroband.observe.guarantees.KEPT_DIGESTS", 512)
    made = RunHistory("run")

    def size_after(numbers: range) -> int:
        for number in numbers:
            for node_id in ("a", "b"):
                made.add(committed(node_id, 2.0 * number, number, ("a", "b")))
                made.add(step(node_id, 2.0 * number, number, outer__round=number))
        return len(pickle.dumps(made))

    full = size_after(range(rounds))
    assert size_after(range(rounds, rounds + more)) < 1.5 * full
    assert made.view().round == rounds + more - 1
