"""Two lines of history of one run, each with its own members and store, detect each other."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.held_stores import HeldStore, open_at
from tests.stores import RUN_ID, SHARED, a_plan

from zeroband.elastic.membership.keys import RunKey
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.membership.records import Peer, Verdict
from zeroband.elastic.membership.succession import Line, SplitBrain
from zeroband.elastic.store.backup import LiveBackup
from zeroband.elastic.store.failover import SplitBrainWatch, StoreFailover
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.errors import LineEnds, StoreLost
from zeroband.node.shared_flags import SharedFlags

KEY = RunKey.of("a token of the run", RUN_ID)


@dataclass
class OneLine:
    """A line with one member, as its store shows it."""

    member: str
    server: HeldStore
    store: RedisStore
    verdict: Verdict

    def renew(self) -> None:
        peer = Peer(self.member, "127.0.0.1", 4000, True, store_port=self.server.port)
        self.store.renew_lease(self.member, peer)


def a_line(stack: ExitStack, member: str, session: str, *known: HeldStore, tokens: int) -> OneLine:
    """A line founded in its own store; its member also knows the stores `known`."""
    server = stack.enter_context(HeldStore(KEY, RUN_ID))
    founder = open_at(stack, server)
    founder.reach(retry_s=5.0)
    founder.found_or_match(SHARED)
    plan = a_plan(member)
    progress = replace(Progress.at_start(), tokens=tokens)
    verdict = Verdict(plan, "d", {"session": session, "progress": progress.to_record()})
    assert founder.propose_plan(plan, current=None, generation=founder.generation)
    assert founder.propose_verdict(verdict, generation=founder.generation)
    store = open_at(stack, server, *known)
    assert founder.generation is not None
    store.enter(store.candidates[0], founder.generation)
    return OneLine(member, server, store, verdict)


def checked(watch: SplitBrainWatch, line: OneLine) -> SplitBrain | None:
    """What a member of the line finds, after it has published where it is."""
    own = Line.of(line.verdict)
    assert own is not None
    line.store.publish_forward_pointer(own)
    return watch.check(own, line.store.survey())


@pytest.mark.parametrize("sessions", ["ab", "ba"])
def test_both_lines_agree_whichever_sees_the_other(stack: ExitStack, sessions: str) -> None:
    one = a_line(stack, "a#1", sessions[0], tokens=10)
    other = a_line(stack, "b#1", sessions[1], one.server, tokens=20)
    lines = (one, other)
    watches, met = [SplitBrainWatch(line.store) for line in lines], list[SplitBrain | None]()
    for _ in range(3):
        for line in lines:
            line.renew()
        met = [checked(watch, line) for watch, line in zip(watches, lines, strict=True)]
    assert met[0] is not None and met[0] == met[1]
    assert met[0].winner == Line(sessions[1], 0, 20, ("b#1",)) and met[0].loser == Line(sessions[0], 0, 10, ("a#1",))


def test_dead_line_is_no_split_brain(stack: ExitStack) -> None:
    gone = a_line(stack, "a#1", "b", tokens=10)
    lives = a_line(stack, "b#1", "a", gone.server, tokens=5)
    watch = SplitBrainWatch(lives.store)
    assert [checked(watch, lives) for _ in range(3)] == [None, None, None]


def test_members_of_the_losing_line_stop_and_the_others_continue(stack: ExitStack, tmp_path: Path) -> None:
    ends = a_line(stack, "a#1", "a", tokens=10)
    goes_on = a_line(stack, "b#1", "b", ends.server, tokens=20)
    events, failovers = list[str](), list[StoreFailover]()

    def note(kind: str, **_fields: object) -> None:
        events.append(kind)

    for line in (ends, goes_on):
        flags = SharedFlags(tmp_path / line.member, create=True)
        memory = LiveBackup(line.member, SHARED)
        memory.committed(line.verdict)
        line.store.session = line.verdict.session
        failover = StoreFailover(line.store, line.member, memory, flags, note, survey_s=0.05)
        stack.callback(flags.close)
        stack.callback(failover.close)
        failovers.append(failover)
    while events.count("split_brain") < 2:
        for line in (ends, goes_on):
            line.renew()
    failovers[1].require_line()
    with pytest.raises(LineEnds, match=r"session b \(round 0, 20 tokens, b#1\) goes on; session a .* ends here"):
        failovers[0].require_line()


def test_node_that_sees_only_its_own_store_needs_bootstrap(stack: ExitStack) -> None:
    servers = [stack.enter_context(HeldStore(KEY, RUN_ID)) for _ in range(2)]
    alone = open_at(stack, servers[0])
    with pytest.raises(StoreLost, match="--bootstrap"):
        alone.reach(retry_s=0.0, least_stores=2)
    assert alone.survey()[0][1].generation is None
    second = open_at(stack, *servers)
    second.reach(retry_s=5.0, least_stores=2)
    alone.reach(retry_s=5.0, least_stores=2)
    assert alone.generation == second.generation is not None
    told = open_at(stack, servers[1])
    told.reach(retry_s=5.0, least_stores=1)
