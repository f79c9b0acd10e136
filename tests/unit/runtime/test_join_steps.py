"""The steps of a joiner: how long it tries, on fake time, and which way it takes. No store, and nobody sends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeroband.checkpoint.restorer import SavedState
from zeroband.data.ledger import SHARED, Ledger
from zeroband.elastic.membership.departure import Departure
from zeroband.elastic.membership.join_states import JoinEvent, JoinState
from zeroband.elastic.membership.orders import Orders
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND, RestartPoint, RoundPlan, Verdict, View
from zeroband.elastic.membership.resume_rules import Held, Holding
from zeroband.elastic.recovery.client import FetchedState, RecoveryClient
from zeroband.elastic.recovery.donors import Donor
from zeroband.elastic.recovery.transfer import Tally
from zeroband.errors import ConfigError, RecoveryFailed, RoundsMissed, RunOver
from zeroband.node.faults import FaultPoints
from zeroband.node.mesh import LocalMesh
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import NoEvents
from zeroband.runtime.join import Joiner, NodeRuntimeSteps
from zeroband.runtime.restart import AbandonedRunWait

TIMEOUT_S = 300.0
WHOLE = FetchedState(7, {}, "digest", received_bytes={}, dropped={}, took_s=0.0)
PLAN = RoundPlan(3, 1, 5, ("a#1", "b#1"), (10, 0), (2, 0))

Act = Callable[["Attempts"], int | None]
"""What an attempt comes to: the rounds that it replays after the whole state, the member's own included, or None."""


class Attempts:
    """Stands for donors and members: plays one act for each attempt to join."""

    def __init__(self, *acts: Act) -> None:
        self.now_s = 0.0
        self.acts = list(acts)
        self.sections = ("params",)
        self.round = -1
        self.progress = Progress.at_start()
        self.count: Callable[[int, int], None] = lambda chunk_bytes, total_bytes: None
        self.digest = self.state_digest = WHOLE.state_digest
        self.tally = Tally()
        self._replays = 0

    def fetch(self, donors: Sequence[Donor], count: Callable[[int, int], None]) -> FetchedState:
        self.count = count
        act = self.acts.pop(0)
        replays = act(self)
        if replays is None:
            raise RecoveryFailed("no donor is left")
        self._replays = replays
        return WHOLE

    def adopt(self, round: int, payload: object, later: object) -> str:
        self.round = round
        return self.digest

    def join(self) -> SimpleNamespace:
        if self.acts:
            raise RoundsMissed(99)
        return SimpleNamespace(round=self.round + self._replays, member_id="a#1", progress=self.progress)

    def catch_up(self, round: int) -> None:
        self.round += self._replays
        raise RecoveryFailed("the journal is out of reach")


def fetches(chunks: int, took_s: float, then: int | None = None, digest: str = WHOLE.state_digest) -> Act:
    def act(attempts: Attempts) -> int | None:
        for _ in range(chunks):
            attempts.count(1, 100)
        attempts.now_s += took_s
        attempts.digest = digest
        return then

    return act


def node_of(local: LocalMesh) -> Any:
    train, elastic = (
        SimpleNamespace(batch_size=4, total_steps=100),
        SimpleNamespace(start_timeout_s=TIMEOUT_S, start_nodes=1),
    )
    config = SimpleNamespace(train=train, elastic=elastic, ckpt=SimpleNamespace(path="there"))
    return SimpleNamespace(local=local, config=config, node_id="a", corpus="a/2", resumes=False)


@pytest.fixture
def join(local: LocalMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """join(act, act): the round with which a joiner became a member, whose attempts came to this."""

    def run(*acts: Act) -> int:
        attempts = Attempts(*acts)
        clock = SimpleNamespace(monotonic=lambda: attempts.now_s, sleep=lambda seconds: None)
        monkeypatch.setattr("zeroband.runtime.join.time", clock)
        monkeypatch.setattr(
            "zeroband.elastic.recovery.client.StateFetch", lambda dialler, sections, **options: attempts
        )
        monkeypatch.setattr(RecoveryClient, "_donors", lambda self, leads=(): [])
        committed = SimpleNamespace(round=7, plan=PLAN, record={})
        view = SimpleNamespace(
            committed=committed,
            plan=PLAN,
            alive={"b#1"},
            restart_point=None,
            is_settling=False,
            orders=Orders(),
        )
        anything: Any = {"params": None}
        store: Any = SimpleNamespace(view=lambda round: view, may_found=lambda: True)
        flags = SharedFlags(tmp_path / "flags", create=True)
        parts: Any = SimpleNamespace(
            outer=attempts,
            recovery=RecoveryClient(store, anything, anything, flags, FaultPoints(()), NoEvents().emit),
            mesh=SimpleNamespace(member_id="a#1", member=SimpleNamespace(outlast_duplicates=lambda: None)),
            memory=SimpleNamespace(recall=lambda numel: None),
            buffers=SimpleNamespace(numel=8),
            store=store,
            restorer=None,
            checkpoint_reports=SimpleNamespace(exchange=lambda member, alive, standing: {}),
        )
        steps = NodeRuntimeSteps(node_of(local), parts, NoEvents())
        try:
            return Joiner(steps, local, Departure(1.0), NoEvents()).enter()[0].round
        finally:
            flags.close()

    return run


@pytest.fixture(autouse=True)
def _ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zeroband.runtime.restart._LINGER_S", 0.0)
    monkeypatch.setattr(AbandonedRunWait, "is_over", lambda self, view, own: False)


NOTHING, CUT_OFF, IN = fetches(0, 200.0), fetches(1, 1000.0), fetches(9, 1000.0, then=1)


def test_fetch_that_is_longer_than_its_time_out_goes_on_after_being_cut_off(join: Callable[..., int]) -> None:
    assert join(CUT_OFF, NOTHING, CUT_OFF, NOTHING, IN) == 8


def test_joiner_gives_up_when_nothing_comes_any_more(join: Callable[..., int]) -> None:
    with pytest.raises(RecoveryFailed, match="no donor is left; no progress for 300 s"):
        join(CUT_OFF, NOTHING, NOTHING, NOTHING, IN)


def test_joiner_that_is_cut_off_from_the_journals_fetches_the_state_again(join: Callable[..., int]) -> None:
    missed_all = fetches(9, 1000.0, then=0)
    assert join(missed_all, CUT_OFF, missed_all, IN) == 8


def test_joiner_whose_states_lead_nowhere_gives_up(join: Callable[..., int]) -> None:
    """The rounds since then are in no journal any more, or the first of them does not verify here."""
    for replayed in (0, 1):
        with pytest.raises(RecoveryFailed, match="the journal is out of reach; no progress"):
            join(*2 * [fetches(9, 1000.0, then=replayed)], IN)


def test_joiner_that_replays_rounds_goes_on(join: Callable[..., int]) -> None:
    assert join(*3 * [fetches(9, 1000.0, then=2)], IN) == 8


def test_joiner_whose_states_are_all_wrong_gives_up(join: Callable[..., int]) -> None:
    with pytest.raises(RecoveryFailed, match="has digest other here"):
        join(*2 * [fetches(9, 1000.0, then=0, digest="other")], IN)


@pytest.mark.parametrize("fault", ["", "its digest", "the journals"])
def test_joiner_begins_from_a_checkpoint_and_replays_or_else_fetches_the_state(local: LocalMesh, fault: str) -> None:
    told: list[tuple[str, dict[str, Any]]] = []

    def catch_up(round: int) -> None:
        if fault == "the journals":
            raise RecoveryFailed("the journal is out of reach")
        outer.round, outer.state_digest = round, f"digest of {round}"

    def adopt(round: int, *state: object, **later: object) -> str:
        outer.round = round
        return f"digest of {round}"

    outer = SimpleNamespace(round=-1, sections=("params",), state_digest="", adopt=adopt, catch_up=catch_up)
    saved = SavedState(4, {}, "another" if fault == "its digest" else "digest of 4", step=40)
    fetched = replace(WHOLE, state_digest="digest of 7")
    recovery = SimpleNamespace(begin=lambda *what, **how: None, fetch_state=lambda: fetched, verified_bytes=0)
    recovery.entry_bytes = lambda round: 10
    newest = SimpleNamespace(session="session", round=4, inner_step=40)
    committed = SimpleNamespace(session="session", round=7)
    run: Any = SimpleNamespace(
        outer=outer,
        recovery=recovery,
        restorer=SimpleNamespace(newest=lambda: newest, read=lambda step, sections: saved),
        store=SimpleNamespace(view=lambda round: SimpleNamespace(committed=committed)),
        sections={},
        is_large=True,
        state_bytes=100,
    )
    events: Any = SimpleNamespace(emit=lambda kind, **fields: told.append((kind, fields)))
    outcome = NodeRuntimeSteps(node_of(local), run, events).take(JoinState.FETCHING, None)
    (_, recovered), is_sound = told[-1], not fault
    assert outcome.event is JoinEvent.FETCHED
    assert (recovered["source"], recovered["round"]) == ("checkpoint" if is_sound else "members", 7)
    assert recovered["digest"] == "digest of 7"


def test_node_with_the_name_of_another_machine_does_not_enter(local: LocalMesh) -> None:
    def refuse() -> None:
        raise ConfigError("node.id='a' is in this run already")

    member = SimpleNamespace(outlast_duplicates=refuse)
    parts: Any = SimpleNamespace(outer=None, mesh=SimpleNamespace(member=member))
    with pytest.raises(ConfigError, match="in this run already"):
        NodeRuntimeSteps(node_of(local), parts, NoEvents()).take(JoinState.WAIT_OLD_LEASE, None)


@pytest.mark.parametrize(("committed", "is_told"), [(5, True), (6, False), (None, False)])
def test_round_in_memory_is_told_of_again_unless_others_went_on(
    local: LocalMesh, committed: int | None, is_told: bool
) -> None:
    """The trainer that crashed stamped the round before it wrote its event."""
    progress = {"inner_step": 10}
    told: list[tuple[str, dict[str, Any]]] = []
    verdict = None if committed is None else SimpleNamespace(round=committed, plan=PLAN)
    outer = SimpleNamespace(adopt=lambda *state: "digest")
    held = SimpleNamespace(round=5, record={"progress": progress}, state_digest="digest", sections={})
    memory = SimpleNamespace(recall=lambda numel: held, drop_set_aside=lambda: None)
    store = SimpleNamespace(view=lambda round: SimpleNamespace(committed=verdict))
    run: Any = SimpleNamespace(outer=outer, memory=memory, store=store, buffers=SimpleNamespace(numel=8))
    events: Any = SimpleNamespace(emit=lambda kind, **fields: told.append((kind, fields)))
    outcome = NodeRuntimeSteps(node_of(local), run, events).take(JoinState.RESTORE_LOCAL, None)
    assert outcome.event is JoinEvent.RECALLED
    assert [kind for kind, _ in told] == [*(["round_committed"] if is_told else []), "recovered"]
    if is_told:
        fields = told[0][1]
        assert (fields["round"], fields["digest"], fields["members"]) == (5, "digest", ["a#1", "b#1"])
        assert (fields["weights"], fields["samples"], fields["progress"]) == ([10, 0], [8, 0], progress)


# -- which way, and with which checkpoint ---------------------------------------------------------------------------


def view_of(
    *, committed: bool = True, alive: str = "", agreed: RestartPoint | None = None, settles: bool = False
) -> View:
    verdict = Verdict(PLAN, "d", {"progress": {}}) if committed else None
    plan = PLAN if committed else None
    return View(plan, verdict, frozenset(alive.split()), {}, {}, None, restart_point=agreed, is_settling=settles)


def held(step: int, *, digest: str = "digest", line: str = "", after: str = "") -> Held:
    return Held(step, step // 10, digest, line, after)


class Place:
    """A run as its store shows it, one view after the other, and the checkpoints of this node and of others."""

    def __init__(
        self,
        local: LocalMesh,
        *views: View,
        resumes: bool = False,
        checkpoints: Sequence[int] = (),
        others: Mapping[str, Holding] | None = None,
        start_nodes: int = 1,
    ) -> None:
        self.views = list(views)
        self.checkpoints = list(checkpoints)
        self.damaged = set[int]()
        self.others = others or {}
        self.told: Holding | None = None
        self.served: FetchedState | None = None
        self.proposed: list[RestartPoint] = []
        self.refuses_first = False
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.founded: list[int] = []
        events: Any = SimpleNamespace(emit=lambda kind, **fields: self.events.append((kind, fields)))
        self.may_found = True
        store = SimpleNamespace(view=self._view, propose_restart_point=self._propose, may_found=lambda: self.may_found)
        self.outer = SimpleNamespace(adopt=lambda *state: "digest", found=self._found, round=-1, sections=("params",))
        self.mesh = SimpleNamespace(member_id="a#9", is_start_over=False, local=local)
        restorer = SimpleNamespace(restore=self._read, holding=self._holding, skipped_steps={})
        restorer.url, restorer.warn_of_newer = "file:///checkpoints", lambda: None
        run: Any = SimpleNamespace(
            store=store,
            mesh=self.mesh,
            outer=self.outer,
            sections={},
            load_inner=lambda step: True,
            forget_inner=lambda: None,
            restorer=restorer,
            recovery=SimpleNamespace(verified_bytes=0, fetch_restart=self._fetch),
            membership=SimpleNamespace(replace_member=lambda: None),
            checkpoint_reports=SimpleNamespace(exchange=self._exchange),
        )
        node = node_of(local)
        node.config.elastic.start_nodes, node.resumes = start_nodes, resumes
        self.steps = NodeRuntimeSteps(node, run, events)

    def _view(self, _round: int) -> View:
        view = self.views.pop(0) if len(self.views) > 1 else self.views[0]
        return replace(view, alive=view.alive | {self.mesh.member_id})

    def _holding(self, step: int | None = None, rejected: Mapping[int, str] | None = None) -> Holding:
        found = [number for number in self.checkpoints if step in (None, number) and number not in (rejected or {})]
        return Holding(held=held(found[0]) if found else None)

    def _exchange(self, member: str, alive: object, standing: Holding) -> dict[str, Holding]:
        self.told = standing
        return {member: standing, **self.others}

    def _read(self, sections: object, step: int) -> SavedState:
        if step in self.damaged:
            raise RecoveryFailed("its hash is another one")
        return SavedState(3, {}, "digest", step=step)

    def _fetch(self, sections: object, agreed: RestartPoint) -> FetchedState:
        if self.served is None:
            raise RecoveryFailed(f"{agreed.member} has not taken it over")
        return self.served

    def _propose(self, point: RestartPoint, _view: View) -> bool:
        is_refused, self.refuses_first = self.refuses_first, False
        self.proposed += [] if is_refused else [point]
        if not is_refused:
            self.views = [replace(self.views[0], restart_point=point)]
        return not is_refused

    def _found(self, round: int) -> SimpleNamespace:
        self.founded.append(round)
        return SimpleNamespace(round=round, member_id="a#9", progress=Progress.at_start())

    def look(self) -> JoinEvent:
        return self.steps.take(JoinState.DISCOVER, None).event

    def agree(self, looks: int) -> list[JoinEvent]:
        assert self.look() is JoinEvent.BEGIN
        return [self.steps.take(JoinState.PICK_CHECKPOINT, None).event for _ in range(looks)]


THEIRS = RestartPoint(6, 40, "digest", "b#2")


@pytest.mark.parametrize(
    ("view", "resumes", "event"),
    [
        (view_of(committed=False), False, JoinEvent.FOUND),
        (view_of(committed=False, settles=True), False, JoinEvent.WAIT),
        (view_of(alive="b#1"), False, JoinEvent.JOIN),
        (view_of(alive="b#1"), True, JoinEvent.JOIN),
        (view_of(), True, JoinEvent.BEGIN),
        (view_of(alive="b#2", agreed=THEIRS), False, JoinEvent.FOLLOW),
        (view_of(alive="b#2", agreed=THEIRS), True, JoinEvent.BEGIN),
        (view_of(alive="b#1 b#2", agreed=THEIRS), True, JoinEvent.JOIN),
    ],
)
def test_way_in_is_what_the_store_shows(local: LocalMesh, view: View, resumes: bool, event: JoinEvent) -> None:
    assert Place(local, view, resumes=resumes).look() is event


def test_no_word_of_a_restart_begins_a_run_of_which_a_member_lives(local: LocalMesh) -> None:
    place = Place(local, view_of(alive="b#1 b#2", agreed=THEIRS), resumes=True, start_nodes=2)
    assert place.look() is JoinEvent.JOIN


@pytest.mark.parametrize(("view", "resumes"), [(view_of(committed=False), False), (view_of(), True)])
def test_nothing_begins_while_the_run_may_go_on_in_a_store_that_does_not_answer(
    local: LocalMesh, view: View, resumes: bool
) -> None:
    place = Place(local, view, resumes=resumes)
    place.may_found = False
    assert place.look() is JoinEvent.WAIT


def test_node_that_was_a_member_founds_nothing_where_the_store_lost_its_record(local: LocalMesh) -> None:
    """The others will bring it back."""
    place = Place(local, view_of(committed=False))
    place.outer.round = 5
    assert place.look() is JoinEvent.JOIN


def test_node_with_the_newest_checkpoint_names_it_and_founds_the_round_after_it(local: LocalMesh) -> None:
    place = Place(local, view_of(), resumes=True, checkpoints=[50, 40])
    assert place.agree(2) == [JoinEvent.AGAIN, JoinEvent.AGREED]
    assert place.proposed == [RestartPoint(6, 50, "digest", "a#9")]
    assert place.steps.take(JoinState.FOUNDING, None).event is JoinEvent.FOUNDED
    assert place.founded == [6]
    assert [kind for kind, _ in place.events] == ["resumed_from", "joined"]


def test_node_with_an_older_checkpoint_waits_for_the_one_with_the_newest(local: LocalMesh) -> None:
    others = {"c#1": Holding(True, held(60))}
    place = Place(local, view_of(alive="c#1"), resumes=True, checkpoints=[50], others=others)
    assert place.agree(2) == [JoinEvent.WAIT, JoinEvent.WAIT]
    assert place.proposed == []


@pytest.mark.parametrize("is_start_over", [False, True])
def test_choice_waits_for_start_nodes_until_the_start_is_over(local: LocalMesh, is_start_over: bool) -> None:
    place = Place(local, view_of(), resumes=True, checkpoints=[50], start_nodes=2)
    place.mesh.is_start_over = is_start_over
    assert place.agree(1) == [JoinEvent.AGAIN if is_start_over else JoinEvent.WAIT]
    assert len(place.proposed) == is_start_over


def test_later_ones_read_the_checkpoint_that_was_named(local: LocalMesh) -> None:
    place = Place(local, view_of(alive="b#2", agreed=THEIRS), resumes=True, checkpoints=[50, 40])
    assert place.agree(1) == [JoinEvent.AGREED]
    assert place.proposed == [] and (place.events[0][1]["step"], place.events[0][1]["source"]) == (40, "checkpoint")


@pytest.mark.parametrize("checkpoints", [[], [30], [40]], ids=["none", "older", "another of that step"])
def test_node_without_the_named_checkpoint_fetches_its_state_before_the_founding(
    local: LocalMesh, checkpoints: list[int]
) -> None:
    agreed = RestartPoint(6, 40, "digest of b" if checkpoints == [40] else "digest", "b#2")
    view = view_of(alive="b#2", agreed=agreed)
    place = Place(local, view, resumes=True, checkpoints=checkpoints, start_nodes=2)
    place.outer.adopt = lambda *state: agreed.state_digest
    assert place.agree(1) == [JoinEvent.WAIT], "who named it has not taken it over yet"
    place.served = replace(WHOLE, round=4, state_digest=agreed.state_digest)
    assert place.steps.take(JoinState.PICK_CHECKPOINT, None).event is JoinEvent.AGREED
    (_, resumed) = place.events[-1]
    assert (resumed["step"], resumed["source"], resumed["has_inner"]) == (40, "members", False)
    place.steps.take(JoinState.FOUNDING, None)
    assert place.founded == [6]


def test_node_that_does_not_resume_takes_part_in_a_founding_that_waits_for_it(local: LocalMesh) -> None:
    view = view_of(alive="b#2", agreed=THEIRS)
    assert Place(local, view, start_nodes=2).look() is JoinEvent.BEGIN
    assert Place(local, view, start_nodes=1).look() is JoinEvent.FOLLOW


@pytest.mark.parametrize("committed", [False, True])
def test_node_that_does_not_resume_begins_again_with_those_that_do(local: LocalMesh, committed: bool) -> None:
    """What it has may be the newest."""
    view = view_of(committed=committed, alive="c#1")
    place = Place(local, view, checkpoints=[50], others={"c#1": Holding(resumes=True)})
    assert place.agree(2) == [JoinEvent.AGAIN, JoinEvent.AGREED]
    assert [point.step for point in place.proposed] == [50]
    place = Place(local, view, checkpoints=[50], others={"c#1": Holding()})
    assert place.look() is (JoinEvent.JOIN if committed else JoinEvent.FOUND)


def test_checkpoint_that_does_not_verify_is_passed_over_and_the_others_are_told(local: LocalMesh) -> None:
    place = Place(local, view_of(), resumes=True, checkpoints=[50, 40])
    place.damaged = {50}
    assert place.agree(3) == [JoinEvent.AGAIN, JoinEvent.AGAIN, JoinEvent.AGREED]
    assert [point.step for point in place.proposed] == [40]
    assert place.told is not None and place.told.held == held(40)


def test_proposal_that_another_one_was_before_is_made_anew(local: LocalMesh) -> None:
    place = Place(local, view_of(), resumes=True, checkpoints=[50])
    place.refuses_first = True
    assert place.agree(3) == [JoinEvent.AGAIN, JoinEvent.AGAIN, JoinEvent.AGREED]


def test_without_a_checkpoint_a_new_run_begins_but_no_dead_one_goes_on(local: LocalMesh) -> None:
    place = Place(local, view_of(committed=False), resumes=True)
    assert place.agree(1) == [JoinEvent.NOTHING]
    assert place.told is not None and not place.told.resumes, "so that nobody waits for it"
    place.steps.take(JoinState.FOUNDING, None)
    assert place.founded == [BOOTSTRAP_ROUND]
    with pytest.raises(RecoveryFailed, match="no node has a checkpoint"):
        Place(local, view_of(), resumes=True).agree(1)


def test_run_that_is_complete_is_not_begun_again_by_a_node_with_an_older_checkpoint(local: LocalMesh) -> None:
    ended = replace(view_of(), committed=Verdict(PLAN, "d", {"progress": {"inner_step": 100}}))
    with pytest.raises(RunOver, match=r"complete since round 5; .* --resume\.step"):
        Place(local, ended, resumes=True, checkpoints=[50]).agree(1)


def test_node_that_cannot_agree_stays_for_a_moment_so_that_the_others_see_why(
    local: LocalMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("zeroband.runtime.restart.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr("zeroband.runtime.restart._LINGER_S", 2.0)
    others = {"c#1": Holding(True, problem="its manifest is damaged")}
    view = view_of(committed=False, alive="c#1")
    place = Place(local, view, resumes=True, start_nodes=2, others=others)
    assert place.agree(1) == [JoinEvent.WAIT]
    place.others, place.views = {}, [view_of(committed=False)]
    assert place.steps.take(JoinState.PICK_CHECKPOINT, None).event is JoinEvent.WAIT
    now_s[0] = 2.0
    with pytest.raises(RecoveryFailed, match="c: its manifest is damaged"):
        place.steps.take(JoinState.PICK_CHECKPOINT, None)


def test_steps_that_no_node_here_has_are_said_to_be_lost(local: LocalMesh, caplog: pytest.LogCaptureFixture) -> None:
    ended = replace(view_of(), committed=Verdict(PLAN, "d", {"progress": {"inner_step": 80}}))
    Place(local, ended, resumes=True, checkpoints=[50]).agree(1)
    assert vars(caplog.records[-1])["fields"] == {"step": 50, "run_was_at": 80, "of": ["a", "b"]}


def test_where_all_checkpoints_are_damaged_no_new_run_begins(local: LocalMesh) -> None:
    others = {"b#1": Holding(True, problem="its manifest is damaged")}
    with pytest.raises(RecoveryFailed, match="b: its manifest is damaged"):
        Place(local, view_of(committed=False), resumes=True, others=others).agree(1)


def test_node_that_agrees_joins_where_a_member_turns_out_to_live(local: LocalMesh) -> None:
    place = Place(local, view_of(), view_of(alive="b#1"), resumes=True, checkpoints=[50])
    assert place.agree(1) == [JoinEvent.JOIN]


def test_node_that_joins_says_that_it_has_a_newer_checkpoint_than_the_run(local: LocalMesh) -> None:
    place = Place(local, view_of(alive="b#1"), checkpoints=[50])
    report = SimpleNamespace(round=7, member_id="a#9", progress=Progress.at_start())
    place.outer.join = lambda: report
    place.steps.take(JoinState.ANNOUNCING, None)
    assert place.events[-1] == ("newer_checkpoint", {"step": 50, "at": 0})
    place.checkpoints = []
    place.steps.take(JoinState.ANNOUNCING, None)
    assert place.events[-1][0] == "joined"


def test_failures_of_an_earlier_way_in_are_no_reason_to_give_up_on_the_next(
    local: LocalMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr("zeroband.runtime.join.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    joins = view_of(alive="b#1")
    place = Place(local, view_of(), resumes=True, checkpoints=[50])
    assert place.steps.take(JoinState.DISCOVER, RecoveryFailed("no donor is left")).event is JoinEvent.BEGIN
    for _ in range(2):
        agreed = place.steps.take(JoinState.PICK_CHECKPOINT, None).event
    assert agreed is JoinEvent.AGREED
    place.steps.take(JoinState.FOUNDING, None)
    place.views = [joins]
    now_s[0] = 10 * TIMEOUT_S
    place.steps.take(JoinState.REJOIN, RecoveryFailed("its lease ran out"))
    assert place.look() is JoinEvent.JOIN


def test_node_with_other_documents_than_before_says_what_it_owes_of_those(
    join: Callable[..., int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers = {"a/1": Ledger(9, ((2, 4), (5, 9))), "a/2": Ledger(4), "b/7": Ledger(8, ((0, 8),)), SHARED: Ledger(3)}
    progress = replace(Progress.at_start(), ledgers=ledgers)
    monkeypatch.setattr(Progress, "at_start", lambda: progress)
    caplog.set_level(logging.WARNING)
    join(fetches(4, took_s=1.0, then=0))
    (said,) = [record for record in caplog.records if "private documents changed" in record.getMessage()]
    assert vars(said)["fields"] == {"before": "a/1", "owed": 6, "now": "a/2"}
