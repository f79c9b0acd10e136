"""Lanes, the rendezvous over Redis, and groups that are left behind instead of waited for."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.elastic.conftest import until

from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.store.redis_store import RedisStore
from zeroband.elastic.transport.base import Gathering, MovedBytes, RoundRequest
from zeroband.elastic.transport.gloo_plane import GroupRendezvous, LaneGroups, lane_bounds, ring_bytes
from zeroband.elastic.transport.stalls import TransferBounds
from zeroband.errors import PeerLost, TransferStalled
from zeroband.node.faults import FaultPoints
from zeroband.node.shared_flags import SharedFlags

NAMES = ("a#1", "b#1", "c#1")
BOUNDS = TransferBounds(stall_s=1.0, max_stall_s=20.0, stream_s=20.0, connect_s=1.0)


# -- lanes ------------------------------------------------------------------------------------------------------------


@given(numel=st.integers(0, 10**12), lanes=st.integers(1, 64))
@pytest.mark.defect(11)
def test_lanes_cover_the_buffer_in_order_and_are_equal_up_to_one_element(numel: int, lanes: int) -> None:
    bounds = lane_bounds(numel, lanes)
    assert [bounds[0][0], *(stop for _, stop in bounds)] == [*(start for start, _ in bounds), numel]
    sizes = [stop - start for start, stop in bounds]
    assert len(bounds) == lanes and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("nodes", "sent"), [(1, 0), (2, 4000), (4, 6000), (14, 7428)])
def test_ring_sends_almost_two_buffers(nodes: int, sent: int) -> None:
    assert ring_bytes(1000, nodes) == sent


# -- rendezvous -------------------------------------------------------------------------------------------------------


def a_rendezvous(
    store: RedisStore, *, timeout_s: float = 10.0, is_abandoned: Callable[[], bool] = bool
) -> GroupRendezvous:
    prefix = store.keys.group(a_plan(*NAMES), 0)
    return GroupRendezvous(store, prefix, timeout_s=timeout_s, is_abandoned=is_abandoned)


def in_threads(work: Callable[[int], object], count: int) -> list[object]:
    """Results of `work(0)`, `work(1)`, ..., one thread each; errors are results too."""
    results: list[object] = [None] * count

    def run(index: int) -> None:
        try:
            results[index] = work(index)
        except PeerLost as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "hangs"
    return results


def test_rendezvous_is_a_store_of_torch(store: RedisStore) -> None:
    rendezvous = a_rendezvous(store)
    rendezvous.set("text", "value")
    for key in ("one", "two"):
        rendezvous.set(key, key)
    assert rendezvous.get("text") == b"value" and not rendezvous.has_extended_api()
    assert [rendezvous.add("n", 2), rendezvous.add("n", 3)] == [2, 5]
    assert rendezvous.check(["one", "two"]) and not rendezvous.check(["one", "three"])
    assert rendezvous.delete_key("one") and not rendezvous.delete_key("one") and not rendezvous.check(["one"])
    rendezvous.wait(["two"], timedelta(seconds=1))
    rendezvous.set_timeout(timedelta(seconds=3))
    assert rendezvous.timeout == timedelta(seconds=3)


def test_rendezvous_waits_for_what_another_process_writes(store: RedisStore) -> None:
    writer = threading.Timer(0.02, lambda: a_rendezvous(store).set("late", b"\x00\xff"))
    writer.start()
    assert a_rendezvous(store).get("late") == b"\x00\xff"
    writer.join()


def test_rendezvous_gives_up_at_its_time_out_and_names_the_key(store: RedisStore) -> None:
    with pytest.raises(PeerLost, match="no process wrote missing for the group"):
        a_rendezvous(store, timeout_s=0.01).get("missing")


def test_rendezvous_gives_up_at_once_when_abandoned(store: RedisStore) -> None:
    with pytest.raises(PeerLost):
        a_rendezvous(store, timeout_s=1e6, is_abandoned=lambda: True).wait(["missing"])


def test_rendezvous_of_another_epoch_sees_nothing(store: RedisStore) -> None:
    """Nor does that of other members: a store that came back with old data gives an epoch's number twice."""
    a_rendezvous(store).set("key", "old")
    for plan in (a_plan(*NAMES, epoch=2), a_plan(*NAMES[:2])):
        other = GroupRendezvous(store, store.keys.group(plan, 0), timeout_s=1.0, is_abandoned=bool)
        assert not other.check(["key"])


def test_three_gloo_processes_meet_over_redis(store: RedisStore) -> None:
    def reduce(rank: int) -> float:
        group = dist.ProcessGroupGloo(a_rendezvous(store), rank, 3, timedelta(seconds=10))
        part = torch.tensor([10.0**rank])
        group.allreduce([part]).wait()
        return part.item()

    assert in_threads(reduce, 3) == [111.0, 111.0, 111.0]


# -- groups of an epoch -----------------------------------------------------------------------------------------------


def a_plan(*members: str, version: int = 1, epoch: int = 1, round: int = 1) -> RoundPlan:
    return RoundPlan(version, epoch, round, members, tuple(1 for _ in members))


@pytest.fixture
def make_groups(tmp_path: Path, store: RedisStore) -> Callable[[int], tuple[LaneGroups, SharedFlags]]:
    """The groups of a node that has one local rank and two lanes."""

    def make(rank: int) -> tuple[LaneGroups, SharedFlags]:
        flags = SharedFlags(tmp_path / f"flags{rank}", create=True)
        return LaneGroups(
            store,
            flags,
            FaultPoints(()),
            lanes=2,
            owned=range(2),
            host="127.0.0.1",
            chunk_bytes=8,
            gloo_timeout_s=20.0,
            bounds=BOUNDS,
        ), flags

    return make


def test_lanes_sum_over_the_nodes_and_serve_all_rounds_of_an_epoch(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    def two_rounds(rank: int) -> list[float]:
        groups, _ = make_groups(rank)
        values = torch.full((2,), 10.0**rank)
        for version in (1, 2):
            plan = a_plan(*NAMES, version=version, round=version)
            groups.connect(plan, rank)
            groups.all_reduce([(0, values[:1]), (1, values[1:])], plan)
        return values.tolist()

    assert in_threads(two_rounds, 3) == [[333.0, 333.0]] * 3


@pytest.mark.defect(11)
def test_lanes_are_sent_in_chunks_and_show_how_far_they_are(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    plan = a_plan("a#1", "b#1")

    def reduce(rank: int) -> tuple[list[float], int]:
        groups, flags = make_groups(rank)
        groups.connect(plan, rank)
        values = torch.arange(7.0) * 10.0**rank
        groups.all_reduce([(0, values[:4]), (1, values[4:])], plan)
        return values.tolist(), flags.progress

    expected = ([11.0 * i for i in range(7)], 5)  # at 0, 25, 50, 75 and 100 %
    assert in_threads(reduce, 2) == [expected] * 2, "two values make a chunk of 8 bytes"


def test_groups_are_built_anew_when_an_epoch_number_comes_again_for_other_members(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    """As after a store that came back with old data."""

    def reduce(rank: int) -> list[float]:
        groups, _ = make_groups(rank)
        sums: list[float] = []
        for version, members in ((1, NAMES[:2]), (2, NAMES[::2])):
            if NAMES[rank] in members:
                plan = a_plan(*members, version=version)
                groups.connect(plan, members.index(NAMES[rank]))
                values = torch.full((2,), 10.0**rank)
                groups.all_reduce([(0, values[:1]), (1, values[1:])], plan)
                sums.append(values[0].item())
        return sums

    assert in_threads(reduce, 3) == [[11.0, 101.0], [11.0], [101.0]]


def test_one_node_needs_no_groups(make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]]) -> None:
    groups, _ = make_groups(0)
    groups.connect(a_plan("a#1"), 0)
    values = torch.ones(4)
    groups.all_reduce([(0, values[:2]), (1, values[2:])], a_plan("a#1"))
    assert values.tolist() == [1.0] * 4


def test_building_a_group_ends_when_its_plan_is_aborted(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    groups, flags = make_groups(0)
    threading.Timer(0.05, flags.abort, args=(4,)).start()
    with pytest.raises(PeerLost, match="building lane 0 of epoch 1"):
        groups.connect(a_plan("a#1", "dead#1", version=4), 0)


def test_transfer_ends_when_its_plan_is_aborted(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    """One of two builds its lanes and never sends: the other must not wait inside gloo."""
    nodes = [make_groups(rank) for rank in range(2)]

    def take_part(rank: int) -> None:
        groups, flags = nodes[rank]
        plan = a_plan("a#1", "b#1", version=4)
        groups.connect(plan, rank)
        if rank == 0:
            threading.Timer(0.05, flags.abort, args=(4,)).start()
            groups.all_reduce([(0, torch.ones(1)), (1, torch.ones(1))], plan)

    first, second = in_threads(take_part, 2)
    assert isinstance(first, PeerLost) and "round 1 was aborted" in str(first)
    assert second is None


def test_abort_of_an_older_plan_does_not_end_a_newer_one(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    def reduce(rank: int) -> float:
        groups, flags = make_groups(rank)
        flags.abort(3)
        plan = a_plan("a#1", "b#1", version=4)
        groups.connect(plan, rank)
        values = torch.ones(2)
        groups.all_reduce([(0, values[:1]), (1, values[1:])], plan)
        return values.sum().item()

    assert in_threads(reduce, 2) == [4.0, 4.0]


def test_next_epoch_meets_under_other_keys(make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]]) -> None:
    def two_epochs(rank: int) -> list[float]:
        groups, _ = make_groups(rank)
        sums: list[float] = []
        for members in (NAMES, NAMES[:2]):
            if rank < len(members):
                plan = a_plan(*members, version=5 - len(members), epoch=5 - len(members))
                groups.connect(plan, rank)
                values = torch.ones(2)
                groups.all_reduce([(0, values[:1]), (1, values[1:])], plan)
                sums.append(values[0].item())
        return sums

    assert in_threads(two_epochs, 3) == [[3.0, 2.0], [3.0, 2.0], [3.0]]


def loops_of_gloo() -> int:
    """Each group has one, with its descriptors and threads."""
    gc.collect()  # what earlier tests left behind
    return sum("eventpoll" in str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())


def test_idle_groups_that_are_left_behind_are_destroyed(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    nodes, before = [make_groups(rank)[0] for rank in range(2)], loops_of_gloo()

    def one_round(rank: int) -> None:
        plan = a_plan("a#1", "b#1")
        nodes[rank].reduce_mean(RoundRequest(plan, plan.members[rank], torch.ones(4), torch.empty(4)))

    in_threads(one_round, 2)
    assert loops_of_gloo() == before + 4
    for groups in nodes:
        groups.abandon()
    assert loops_of_gloo() == before


def test_groups_of_an_aborted_transfer_are_destroyed_with_its_buffer_once_nothing_runs_in_them(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]], tmp_path: Path
) -> None:
    plan, before = a_plan("a#1", "b#1", version=4), loops_of_gloo()
    (first, flags), (second, _) = make_groups(0), make_groups(1)
    in_threads(lambda rank: (first, second)[rank].connect(plan, rank), 2)
    buffer = tmp_path / "buffer"

    flags.abort(4)  # seen when the operations have begun
    result = torch.from_file(str(buffer), shared=True, size=4)
    with pytest.raises(PeerLost, match="was aborted"):
        first.reduce_mean(RoundRequest(plan, "a#1", torch.ones(4), result))
    del result
    first.abandon()
    assert loops_of_gloo() == before + 4 and is_mapped(buffer), "an operation still may write to it"

    second.abandon()  # ends what waits for it

    def is_destroyed() -> bool:
        first.abandon()  # looks at what was left behind before
        return loops_of_gloo() == before

    until(is_destroyed)
    assert not is_mapped(buffer)


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text(encoding="utf-8")


# -- payloads ---------------------------------------------------------------------------------------------------------


def payload_of(rank: int) -> torch.Tensor:
    """Of a length that the lanes do not divide; the second member has none."""
    return torch.arange(0 if rank == 1 else 75 + rank, dtype=torch.uint8) + 100 * rank


def test_payloads_are_gathered_over_the_lanes(make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]]) -> None:
    lengths = tuple(len(payload_of(rank)) for rank in range(3))

    def gather(rank: int) -> list[int]:
        groups, _ = make_groups(rank)
        result = torch.zeros(sum(lengths), dtype=torch.uint8)
        gathering = Gathering(lengths)
        moved = groups.gather(RoundRequest(a_plan(*NAMES), NAMES[rank], payload_of(rank), result), gathering)
        assert moved == MovedBytes(2 * lengths[rank], sum(lengths) - lengths[rank])
        return result.tolist()

    expected = torch.cat([payload_of(rank) for rank in range(3)]).tolist()
    assert in_threads(gather, 3) == [expected] * 3


def test_gathering_ends_when_its_plan_is_aborted(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    nodes = [make_groups(rank) for rank in range(2)]

    def take_part(rank: int) -> None:
        groups, flags = nodes[rank]
        plan = a_plan("a#1", "b#1", version=4)
        if rank == 1:
            groups.connect(plan, rank)
            return
        threading.Timer(0.3, flags.abort, args=(4,)).start()
        payload, result = torch.ones(5, dtype=torch.uint8), torch.ones(10, dtype=torch.uint8)
        groups.gather(RoundRequest(plan, "a#1", payload, result), Gathering((5, 5)))

    first, second = in_threads(take_part, 2)
    assert isinstance(first, PeerLost) and "round 1 was aborted" in str(first)
    assert second is None


# -- stalls -----------------------------------------------------------------------------------------------------------


def test_transfer_of_which_no_piece_ends_is_given_up_and_waited_for_longer_next_time(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    """The other one is in the group, and begins nothing."""
    nodes, plan = [make_groups(rank)[0] for rank in range(2)], a_plan("a#1", "b#1")

    def take_part(rank: int) -> None:
        nodes[rank].connect(plan, rank)
        if rank == 0:
            nodes[0].reduce_mean(RoundRequest(plan, "a#1", torch.ones(4), torch.empty(4)))

    stalled, _ = in_threads(take_part, 2)
    assert isinstance(stalled, TransferStalled) and "piece 1 of 2 did not end" in str(stalled)
    assert (stalled.member_ids, stalled.at_byte) == (plan.members, 0) and stalled.since_s >= BOUNDS.stall_s
    assert nodes[0].stall_limit_s == 2 * BOUNDS.stall_s


def test_group_that_a_member_does_not_come_to_is_given_up(
    make_groups: Callable[[int], tuple[LaneGroups, SharedFlags]],
) -> None:
    groups, flags = make_groups(0)
    plan = a_plan("a#1", "b#1")
    with pytest.raises(TransferStalled, match="not all of b#1 were reached within"):
        groups.connect(plan, 0)
    flags.abort(plan.version)  # as the mesh does; ends the thread that builds
