"""Nodes are killed, frozen and refused: the others go on, lost ones come back, no step, sample or process is left over.

Five runs of real processes serve many faults; the tests read what the runs recorded. Faults of `fault.inject` strike
at exact points of a round; `+` counts the rounds that the node took part in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from tests.faults.conftest import SLOW_PACE

from zeroband.elastic.membership.progress import Progress
from zeroband.observe.view import node_id_of_member
from zeroband.tools.data.audit import audit, read_rounds

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(900)]

RecordRun = Callable[..., Any]
Story = Any
Recorded = Any

SLACK_S = 15.0
"""What a survivor may need beyond `fault.detect_s`; generous, because its cores may be busy with other things."""

STEADY = {"diloco": "node0", "ddp": "node0", "uneven": "node1", "eager": "node0", "private": "node0"}
"""Each run, and a node of it to which nothing happens."""

BY_HAND = {run: [pytest.mark.soak] for run in ("ddp", "uneven", "eager", "private")}
"""Runs that not every day has the time for. Daily, tests/unit/outer/test_overlap.py loses nodes of overlapped rounds,
tests/integration/test_payloads.py those of rounds of one step and of nodes of two sizes, and
tests/integration/test_private_data.py one that has documents of its own."""


OWN = ["--data.source.documents", "150"]
"""Of a node whose documents are not those of the others."""


def kill(point: str) -> list[str]:
    return ["--fault.inject", f"{SLOW_PACE},{point}=SIGKILL"]


@pytest.fixture(scope="module")
def diloco(record_run: RecordRun) -> Recorded:
    """Of four nodes one is killed in an inner step, then in the reduce, one frozen, two lost at once, one left over."""

    def tell(story: Story) -> None:
        story.until_struck("node3")
        story.cluster.restart("node3", arguments=kill("opened@+3"))
        story.refuse("run.token", token="friend")
        story.refuse("optim.adamw.lr", "--optim.adamw.lr", "1e-3")
        story.refuse("protocol", patch="store.PROTOCOL += 1")
        story.until_struck("node3")
        story.cluster.restart("node3", arguments=[])
        story.until_contributing("node0", "node1", "node2")
        story.node("node2").pause()
        story.until(lambda: "node2" not in story.members(), "the others go on without node2")
        story.node("node2").resume()
        story.until_contributing("node0", "node1", "node2", "node3")
        story.node("node1").kill()
        story.node("node2").kill()
        story.until_contributing("node0", "node3")
        story.node("node3").kill()
        story.until_contributing("node0")

    outer = ("diloco", "--outer.inner-steps", "5")
    return record_run(
        tell, outer=outer, ranks=(1, 1, 1, 1), faults={"node3": kill("inner@+2")}, steps_per_round=5, pace=SLOW_PACE
    )


@pytest.fixture(scope="module")
def ddp(record_run: RecordRun) -> Recorded:
    """Of three nodes, one is killed between its transfer and its vote, comes back, and is killed after it applied."""

    def tell(story: Story) -> None:
        story.until_struck("node2")
        story.cluster.restart("node2", arguments=kill("applied@+5"))
        story.until_struck("node2")
        story.until_contributing("node0", "node1")

    outer, faults = ("ddp", "--model.d-model", "64"), {"node2": kill("reduced@+5")}
    return record_run(
        tell, outer=outer, ranks=(1, 1, 1), faults=faults, batch_size=32, has_own_steps=False, pace=SLOW_PACE
    )


@pytest.fixture(scope="module")
def uneven(record_run: RecordRun) -> Recorded:
    """A node of two ranks and one of one; the larger one is killed between verdict and apply, and comes back."""

    def tell(story: Story) -> None:
        story.until_struck("node0")
        story.until_contributing("node1")
        story.cluster.restart("node0", arguments=[])
        story.until_contributing("node0", "node1", rounds=3)

    outer = ("diloco", "--outer.inner-steps", "5", "--comm.lanes", "3")
    return record_run(
        tell, outer=outer, ranks=(2, 1), faults={"node0": kill("committed@+2")}, steps_per_round=5, pace=SLOW_PACE
    )


@pytest.fixture(scope="module")
def eager(record_run: RecordRun) -> Recorded:
    """Rounds travel beside training: a node is killed in one, comes back, and is killed between two."""

    def tell(story: Story) -> None:
        story.until_struck("node1")
        story.cluster.restart("node1", arguments=kill("inner@+3"))
        story.until_struck("node1")
        story.cluster.restart("node1", arguments=[])
        story.until_contributing("node0", "node1")

    outer = ("diloco", "--outer.inner-steps", "5", "--outer.overlap", "full", "--outer.merge", "eager")
    faults = {"node1": kill("reduced@+3")}
    return record_run(tell, outer=outer, ranks=(2, 1), faults=faults, steps_per_round=5, pace=SLOW_PACE)


@pytest.fixture(scope="module")
def private(record_run: RecordRun) -> Recorded:
    """Rounds travel beside training, on documents of each node's own: one is killed in a round, and between two."""

    def tell(story: Story) -> None:
        story.until_struck("node1")
        story.until_contributing("node0")
        story.cluster.restart("node1", arguments=[*OWN, *kill("applied@+3")])
        story.until_struck("node1")
        story.cluster.restart("node1", arguments=OWN)
        story.until_contributing("node0", "node1", rounds=4)

    outer = ("diloco", "--outer.inner-steps", "5", "--outer.overlap", "full", "--data.private", "true")
    faults = {"node1": [*OWN, *kill("reduced@+3")]}
    return record_run(tell, outer=outer, ranks=(2, 1), faults=faults, steps_per_round=5, pace=SLOW_PACE)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Recorded:
    """Any of the runs, by its name."""
    return request.getfixturevalue(request.param)


runs = [pytest.param(run, marks=BY_HAND.get(run, ())) for run in STEADY]
every_run = pytest.mark.parametrize("run", runs, indirect=True)
steady_nodes = [pytest.param(run, node_id, marks=BY_HAND.get(run, ())) for run, node_id in STEADY.items()]
every_steady_node = pytest.mark.parametrize(("run", "steady"), steady_nodes, indirect=["run"])


# -- what holds in every run ----------------------------------------------------------------------------------------


@every_run
def test_all_members_hold_the_same_state_after_every_round(run: Recorded) -> None:
    assert list(run.history) == list(range(len(run.history)))
    for number, verdict in run.history.items():
        reported = run.of_round("round_committed", number)
        assert set(reported) <= {node_id_of_member(m) for m in verdict.members}
        is_newest = number == len(run.history) - 1  # the nodes may have been ended before they reported it
        assert len({event["digest"] for event in reported.values()}) in ((0, 1) if is_newest else (1,)), number


@every_run
@pytest.mark.defect(7)
@pytest.mark.defect(10)
def test_rejoined_nodes_hold_the_state_of_the_others_from_their_first_round_to_their_last(run: Recorded) -> None:
    """What they learn counts in full from the first round on that has them; where every step is a round, after it."""
    lives = [life for node_id in run.events for life in run.lives(node_id)[1:]]
    ends = {life.member_id: life.last for node_id in run.events for life in run.lives(node_id)}
    assert max(life.last - life.first for life in lives) > 1
    for life in lives:
        node_id = node_id_of_member(life.member_id)
        counted = [life.member_id in run.contributors(number) for number in range(life.first, life.last + 1)]
        assert counted[0] == run.setup.has_own_steps and all(counted[1:]), (life, counted)
        (joined,) = [e for e in run.events[node_id] if e["kind"] == "joined" and e["member_id"] == life.member_id]
        missed = [run.history[number].plan for number in range(joined["round"], life.first)]
        assert joined["round"] <= life.first and (run.setup.has_own_steps or not missed)
        # Rounds that were opened before the joiner claimed samples do not know it; later ones keep its samples for it.
        assert all(life.member_id in plan.late for plan in missed[run.setup.rounds_held :]), (life, missed)
        for number in range(life.first, life.last):
            reported = run.of_round("round_committed", number)
            assert len({event["digest"] for event in reported.values()}) == 1
            # A late node trains on while its contribution travels, and reports that round together with its next one.
            silent = [m for m in run.history[number].members if node_id_of_member(m) not in reported]
            assert all(ends[member] <= number + 1 for member in silent), (number, silent)


@every_run
def test_every_sample_is_trained_once_or_still_owed(run: Recorded) -> None:
    trained: dict[str, Counter[int]] = defaultdict(Counter)
    for number, verdict in list(run.history.items())[1:]:
        for member, samples in run.trained(number).items():
            trained[verdict.plan.corpus_of()[member]].update(samples)
    last = Progress.from_record(run.history[len(run.history) - 1].record["progress"])
    assert trained and set(trained) == set(last.ledgers)
    for corpus, ledger in last.ledgers.items():
        assert set(trained[corpus].values()) == {1}
        owed = {index for start, stop in ledger.owed for index in range(start, stop)}
        assert not owed & set(trained[corpus])
        assert owed | set(trained[corpus]) == set(range(ledger.next))
    assert audit(read_rounds(run.run_dir)).is_exact


@every_steady_node
def test_steady_node_loses_no_inner_step(run: Recorded, steady: str) -> None:
    steps = [record["step"] for record in run.metrics[steady]]
    assert steps == list(range(1, len(steps) + 1))
    rounds = [event["round"] for event in run.events[steady] if event["kind"] == "round_committed" and event["round"]]
    assert rounds == list(range(1, len(rounds) + 1))
    plans = [verdict.plan for verdict in list(run.history.values())[1:]]
    for plan in [o for o in plans if o.round <= len(rounds)]:  # the others may end a moment after it
        number = [node_id_of_member(m) for m in plan.members].index(steady)
        if plan.steps_requested[number]:  # it leaves with the last round, which it does not finish
            weight = plan.weights[number]
            assert run.setup.tokens_per_round - run.setup.ragged_tokens < weight <= run.setup.tokens_per_round


@every_run
def test_rounds_are_committed_within_the_time_of_detection(run: Recorded) -> None:
    costs = [seconds for number in run.history for seconds in run.took_s(number)]
    assert costs
    assert max(costs) < run.setup.detect_s + SLACK_S


@every_run
def test_nothing_is_left_behind(run: Recorded) -> None:
    assert run.left_behind == []


# -- the faults of each run -----------------------------------------------------------------------------------------


LOSSES = [
    pytest.param("diloco", "node3", 0, id="in an inner step"),
    pytest.param("diloco", "node3", 1, id="in the reduce"),
    pytest.param("diloco", "node2", 0, id="frozen"),
    pytest.param("ddp", "node2", 0, id="before its vote", marks=BY_HAND["ddp"]),
    pytest.param("ddp", "node2", 1, id="after it applied", marks=BY_HAND["ddp"]),
    pytest.param("uneven", "node0", 0, id="before it applied", marks=BY_HAND["uneven"]),
    pytest.param("eager", "node1", 0, id="beside training", marks=BY_HAND["eager"]),
    pytest.param("eager", "node1", 1, id="between two rounds beside training", marks=BY_HAND["eager"]),
]
every_loss = pytest.mark.parametrize(("run", "node_id", "life"), LOSSES, indirect=["run"])


@every_loss
def test_survivors_commit_the_round_of_a_loss_with_all_their_tokens(run: Recorded, node_id: str, life: int) -> None:
    lost = run.lives(node_id)[life]
    before, after = run.history[lost.last], run.history[lost.last + 1]
    assert lost.member_id in run.contributors(before.round)
    assert set(before.members) - set(after.members) == {lost.member_id}
    assert after.plan.epoch > before.plan.epoch
    reported = run.of_round("round_committed", after.round)
    assert set(reported) == {node_id_of_member(m) for m in after.members}
    assert len({event["digest"] for event in reported.values()}) == 1
    weights = dict(zip(after.members, after.plan.weights, strict=True))
    joined = set(after.members) - set(before.members)  # an earlier loss may come back with this very round
    assert {weights.pop(member) > 0 for member in joined} <= {run.setup.has_own_steps}
    assert weights and min(weights.values()) > run.setup.tokens_per_round - run.setup.ragged_tokens


@every_loss
def test_samples_of_a_lost_node_are_trained_by_others(run: Recorded, node_id: str, life: int) -> None:
    lost = run.lives(node_id)[life]
    owed = run.assigned(lost.last + 1)[lost.member_id]
    assert len(owed) == run.setup.rounds_held * run.setup.steps_per_round * run.setup.batch_size
    trainers: set[str] = set()
    for number in range(lost.last + 2, len(run.history)):
        for member, samples in run.trained(number).items():
            if samples & owed:
                owed -= samples
                trainers.add(member)
        if not owed:
            break
    assert owed == set()
    assert lost.member_id not in trainers


@pytest.mark.soak
@pytest.mark.parametrize("life", [0, 1])
def test_samples_of_a_lost_node_s_own_documents_wait_for_it(private: Recorded, life: int) -> None:
    lost, after = private.lives("node1")[life : life + 2]
    owed = private.assigned(lost.last + 1)[lost.member_id]
    assert len(owed) == private.setup.rounds_held * private.setup.steps_per_round * private.setup.batch_size
    later = range(after.first + 1, after.last + 1)
    assert owed <= set().union(*(private.assigned(number)[after.member_id] for number in later))


def test_one_node_of_four_is_lost_in_an_inner_step_and_in_the_reduce(diloco: Recorded) -> None:
    first, second, third = diloco.lives("node3")
    assert (first.first, first.last) == (0, 2)
    assert second.last == second.first + 2
    for lost in (first, second):
        assert len(diloco.history[lost.last].members) == 4
        assert len(diloco.history[lost.last + 1].members) == 3
    assert diloco.of_round("round_retried", first.last + 1) == {}  # it had not arrived: nothing was begun without it
    retried = set(diloco.of_round("round_retried", second.last + 1))  # who had not looked yet sees the next plan only
    assert retried and retried <= {"node0", "node1", "node2"}
    assert third.first > second.last + 1


def test_frozen_node_is_fenced_and_comes_back_as_another_member(diloco: Recorded) -> None:
    first, second = diloco.lives("node2")
    (fenced,) = [event for event in diloco.events["node2"] if event["kind"] == "fenced"]
    assert first.member_id in fenced["reason"]
    assert second.first > first.last + 1
    assert len([event for event in diloco.events["node2"] if event["kind"] == "node_started"]) == 1


def test_two_nodes_of_four_are_lost_at_once(diloco: Recorded) -> None:
    lost = [diloco.lives("node1")[-1], diloco.lives("node2")[-1]]
    assert len(diloco.history[min(life.last for life in lost)].members) == 4
    after = diloco.history[max(life.last for life in lost) + 1]
    assert sorted(node_id_of_member(m) for m in diloco.contributors(after.round)) == ["node0", "node3"]
    # the second one may have given its vote already when the first one died before its own
    assert abs(lost[0].last - lost[1].last) <= 1


def test_last_node_goes_on_alone(diloco: Recorded) -> None:
    lost = diloco.lives("node3")[-1]
    alone = [verdict for verdict in diloco.history.values() if verdict.round > lost.last]
    assert alone
    assert all([node_id_of_member(m) for m in diloco.contributors(verdict.round)] == ["node0"] for verdict in alone)


@pytest.mark.parametrize("key", ["run.token", "optim.adamw.lr", "protocol"])
def test_stranger_is_refused_and_told_the_differing_key(diloco: Recorded, key: str) -> None:
    exit_code, said = diloco.refusals[key]
    assert (exit_code, said.count("Traceback")) == (2, 0), said
    assert f"refused at join: {key} is" in said
    assert diloco.setup.token not in said
    threads = said.partition("threads:")[2]
    assert threads and "gloo" not in threads, "a process group that is open at the exit can abort it"


@pytest.mark.soak
def test_node_lost_before_its_vote_makes_its_round_open_again(ddp: Recorded) -> None:
    first = ddp.lives("node2")[0]
    assert (first.first, first.last) == (0, 5)
    assert set(ddp.of_round("round_retried", 6)) == {"node0", "node1"}


@pytest.mark.soak
def test_joiner_of_fast_steps_is_admitted_soon(ddp: Recorded) -> None:
    joined = ddp.lives("node2")[1]
    (recovered,) = [event for event in ddp.events["node2"] if event["kind"] == "recovered"]
    assert joined.first - recovered["round"] < 100


@pytest.mark.soak
def test_node_lost_between_verdict_and_apply_has_contributed(uneven: Recorded) -> None:
    first = uneven.lives("node0")[0]
    assert (first.first, first.last) == (0, 3)
    assert set(uneven.of_round("round_committed", 3)) == {"node1"}
    assert len(uneven.contributors(3)) == 2
    assert uneven.of_round("round_retried", 4) == {}
