"""How long a joiner goes on trying, on fake time; the fetcher that it asks is real, what it fetches is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zeroband.elastic.membership.records import Opening
from zeroband.elastic.recovery.donors import Donor
from zeroband.elastic.recovery.fetcher import Fetcher
from zeroband.elastic.recovery.recovery import FetchedState
from zeroband.errors import ConfigError, RecoveryFailed
from zeroband.node.faults import FaultPoints
from zeroband.node.mesh import LocalMesh
from zeroband.node.shared_flags import SharedFlags
from zeroband.observe.events import NoEvents
from zeroband.runtime.join import Joiner

PATIENCE_S = 300.0
WHOLE = FetchedState(7, {}, "digest", {}, {}, 0.0)

Act = Callable[["Attempts"], int | None]
"""What an attempt comes to: the rounds that it replays after the whole state, the member's own included, or None."""


class Attempts:
    """Stands for donors and members: plays one act for each attempt to join."""

    def __init__(self, *acts: Act) -> None:
        self.now_s = 0.0
        self.acts = list(acts)
        self.sections = ("params",)
        self.round = -1
        self.count: Callable[[int, int], None] = lambda chunk_bytes, total_bytes: None
        self.digest = WHOLE.state_digest
        self._replays = 0

    def fetch(self, donors: Sequence[Donor], count: Callable[[int, int], None]) -> FetchedState:
        self.count = count
        act = self.acts.pop(0)
        replays = act(self)
        if replays is None:
            raise RecoveryFailed("no donor is left")
        self._replays = replays
        return WHOLE

    def distrust(self) -> None:
        """Others are asked next."""

    def adopt(self, round: int, payload: object) -> str:
        self.round = round
        return self.digest

    def join(self) -> SimpleNamespace:
        self.round += self._replays
        if self.acts:
            raise RecoveryFailed("the journal is out of reach")
        return SimpleNamespace(round=self.round)


def fetches(chunks: int, took_s: float, then: int | None = None, digest: str = WHOLE.state_digest) -> Act:
    def act(attempts: Attempts) -> int | None:
        for _ in range(chunks):
            attempts.count(1, 100)
        attempts.now_s += took_s
        attempts.digest = digest
        return then

    return act


@pytest.fixture
def join(local: LocalMesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """join(act, act): the round with which a joiner became a member, whose attempts came to this."""

    def run(*acts: Act) -> int:
        attempts = Attempts(*acts)
        clock = SimpleNamespace(monotonic=lambda: attempts.now_s, sleep=lambda seconds: None)
        monkeypatch.setattr("zeroband.runtime.join.time", clock)
        monkeypatch.setattr("zeroband.elastic.recovery.fetcher.StateFetch", lambda dialler, sections: attempts)
        monkeypatch.setattr(Fetcher, "_donors", lambda self: [])
        monkeypatch.setattr(Joiner, "_way_in", lambda self: "join")
        monkeypatch.setattr(Joiner, "_say_wait", lambda self, why, since_s: None)
        anything: Any = {"params": None}
        flags = SharedFlags(tmp_path / "flags", create=True)
        fetcher = Fetcher(anything, anything, anything, flags, FaultPoints(()))
        mesh = SimpleNamespace(member_id="a#1")
        parts: Any = SimpleNamespace(outer=attempts, fetcher=fetcher, mesh=mesh)
        try:
            return Joiner(parts, local, NoEvents(), batch_size=4, patience_s=PATIENCE_S).join().round
        finally:
            flags.close()

    return run


NOTHING, CUT_OFF, IN = fetches(0, 200.0), fetches(1, 1000.0), fetches(9, 1000.0, then=1)


def test_fetch_that_is_longer_than_the_patience_goes_on_after_being_cut_off(join: Callable[..., int]) -> None:
    assert join(CUT_OFF, NOTHING, CUT_OFF, NOTHING, IN) == 8


def test_joiner_gives_up_when_nothing_comes_any_more(join: Callable[..., int]) -> None:
    with pytest.raises(RecoveryFailed, match="no donor is left; came no further for 300 s"):
        join(CUT_OFF, NOTHING, NOTHING, NOTHING, IN)


def test_joiner_that_is_cut_off_from_the_journals_fetches_the_state_again(join: Callable[..., int]) -> None:
    missed_all = fetches(9, 1000.0, then=0)
    assert join(missed_all, CUT_OFF, missed_all, IN) == 8


def test_joiner_whose_states_lead_nowhere_gives_up(join: Callable[..., int]) -> None:
    """The rounds since then are in no journal any more, or the first of them does not verify here."""
    for replayed in (0, 1):
        with pytest.raises(RecoveryFailed, match="the journal is out of reach; came no further"):
            join(*2 * [fetches(9, 1000.0, then=replayed)], IN)


def test_joiner_that_replays_rounds_goes_on(join: Callable[..., int]) -> None:
    assert join(*3 * [fetches(9, 1000.0, then=2)], IN) == 8


def test_joiner_whose_states_are_all_wrong_gives_up(join: Callable[..., int]) -> None:
    with pytest.raises(RecoveryFailed, match="has digest other here"):
        join(*2 * [fetches(9, 1000.0, then=0, digest="other")], IN)


def test_node_with_the_name_of_another_machine_does_not_enter(local: LocalMesh) -> None:
    def refuse() -> None:
        raise ConfigError("node.id='a' is in this run already")

    member = SimpleNamespace(outlast_duplicates=refuse)
    parts: Any = SimpleNamespace(outer=None, mesh=SimpleNamespace(member=member))
    with pytest.raises(ConfigError, match="in this run already"):
        Joiner(parts, local, NoEvents(), batch_size=4, patience_s=PATIENCE_S).enter()


@pytest.mark.parametrize(("committed", "is_told"), [(5, True), (6, False), (None, False)])
def test_round_in_memory_is_told_of_again_unless_others_went_on(
    local: LocalMesh, committed: int | None, is_told: bool
) -> None:
    """The trainer that crashed stamped the round before it wrote its event."""
    opening = Opening(3, 1, 5, ("a#1", "b#1"), (10, 0), (2, 0))
    progress = {"inner_step": 10}
    told: list[tuple[str, dict[str, Any]]] = []
    verdict = None if committed is None else SimpleNamespace(round=committed, opening=opening)
    outer = SimpleNamespace(adopt=lambda *state: "digest", join=lambda: SimpleNamespace(round=6, member_id="a#2"))
    held = SimpleNamespace(round=5, record={"progress": progress}, state_digest="digest", sections={})
    memory = SimpleNamespace(recall=lambda numel: held, drop_held=lambda: None)
    store = SimpleNamespace(view=lambda round: SimpleNamespace(committed=verdict))
    member, buffers = SimpleNamespace(outlast_duplicates=lambda: None), SimpleNamespace(numel=8)
    mesh = SimpleNamespace(member_id="a#2", member=member)
    run: Any = SimpleNamespace(outer=outer, memory=memory, store=store, mesh=mesh, buffers=buffers)
    events: Any = SimpleNamespace(emit=lambda kind, **fields: told.append((kind, fields)))
    report = Joiner(run, local, events, batch_size=4, patience_s=PATIENCE_S).enter()
    assert report.round == 6
    kinds = [kind for kind, _ in told]
    assert kinds == [*(["round_committed"] if is_told else []), "recovered", "joined"]
    if is_told:
        fields = told[0][1]
        assert (fields["round"], fields["digest"], fields["members"]) == (5, "digest", ["a#1", "b#1"])
        assert (fields["weights"], fields["samples"], fields["progress"]) == ([10, 0], [8, 0], progress)
