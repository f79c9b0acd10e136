"""The audit of a mean: what is drawn, what it finds of members that lie about a sum or about what they sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from tests.unit.elastic.conftest import Net, ends_of, noise
from torch import Tensor

from zeroband.elastic.membership.blame import judge, refusal
from zeroband.elastic.membership.records import Evidence, RoundPlan
from zeroband.elastic.rounds import audit as audits
from zeroband.elastic.rounds.audit import AuditedRange, Auditor, chance_of, drawers, hits, stretch_at
from zeroband.elastic.transport.base import Gathering, RoundRequest, Transfer
from zeroband.elastic.transport.engine import Encoded, State
from zeroband.elastic.transport.shape import shape_of
from zeroband.kernels import native
from zeroband.kernels.codec import CODECS, Codec
from zeroband.kernels.keyed_hash import HashKey, PartHashes
from zeroband.kernels.robust import PIECE, Robustly, RobustRule

NODES = ("a#1", "b#1", "c#1", "d#1")
NUMEL = 40_000
KeptNet = Callable[[int, bool], Net]


def a_plan(members: Sequence[str] = NODES, **fields: Any) -> RoundPlan:
    return RoundPlan(5, 2, 3, tuple(members), fields.pop("weights", (1,) * len(members)), **fields)


# -- what is drawn --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("numel", "world", "count"), [(1000, 2, 2), (1000, 4, 4), (1000, 64, 2), (1 << 30, 4, 4), (1 << 30, 512, 8)]
)
def test_few_members_draw_and_all_together_no_more_than_a_round_affords(numel: int, world: int, count: int) -> None:
    members = [f"n{place}#1" for place in range(world)]
    chosen = drawers(a_plan(members), numel)
    assert len(chosen) == count and set(chosen) <= set(range(world))
    assert drawers(a_plan(members), numel) == chosen, "all members come to the same"


def test_others_draw_in_other_plans() -> None:
    members = [f"n{place}#1" for place in range(32)]
    every = {drawers(RoundPlan(version, 2, 3, tuple(members), (1,) * 32), 1000) for version in range(1, 20)}
    assert len(every) > 10


BORDERS = (0, 20_000, 20_000, 33_000, 40_000)


@pytest.mark.parametrize(
    ("position", "stretch"),
    [
        (0, AuditedRange(0, 0, 4096)),
        (4999, AuditedRange(0, 4096, 5000)),  # the chunk ends there
        (5000, AuditedRange(0, 5000, 9096)),
        (19_999, AuditedRange(0, 19_096, 20_000)),
        (20_000, AuditedRange(2, 20_000, 24_096)),  # the second member owns nothing
        (39_999, AuditedRange(3, 38_000, 40_000)),
    ],
)
def test_stretch_is_a_piece_of_one_chunk_of_one_shard(position: int, stretch: AuditedRange) -> None:
    assert stretch_at(position, BORDERS, 5000) == stretch


def test_stretches_cover_a_result_without_overlap() -> None:
    found = sorted({(s.start, s.stop) for s in (stretch_at(p, BORDERS, 5000) for p in range(40_000))})
    assert found[0][0] == 0 and found[-1][1] == 40_000
    assert all(stop == start for (_, stop), (start, _) in pairwise(found))


# -- hashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4160, 4 * PIECE])
def test_hash_is_the_same_on_every_instruction_set_and_another_for_other_bytes(nbytes: int) -> None:
    key, data = HashKey(), torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    hashes = {key.hash(data, variant=variant) for variant in range(len(native.variants()))}
    assert len(hashes) == 1
    if nbytes:
        other = data.clone()
        other[-1] ^= 1
        assert key.hash(other) not in hashes and HashKey().hash(data) not in hashes


@pytest.mark.parametrize("name", CODECS)
def test_part_of_an_encoding_is_the_encoding_of_the_part(name: str) -> None:
    codec, x = CODECS[name], noise(10_001)
    data = codec.encode(x)
    for start, stop in ((0, 4096), (4096, 8192), (8192, 10_001)):
        part = codec.part_of(data, x.numel(), start, stop - start)
        assert torch.equal(part, codec.encode(x[start:stop].contiguous()))


# -- members that lie -----------------------------------------------------------------------------------------------


class Meeting:
    """Where members that are threads gather."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=10)
        self._told: dict[int, dict[int, Tensor]] = {}
        self._lock = threading.Lock()

    @property
    def numbers(self) -> list[int]:
        """Of the gatherings that there were."""
        return sorted(self._told)

    def gather(self, place: int, gathering: Gathering, sent: Tensor, result: Tensor) -> None:
        with self._lock:
            self._told.setdefault(gathering.number, {})[place] = sent.clone()
        self._barrier.wait()
        result.copy_(torch.cat([self._told[gathering.number][p] for p in range(len(gathering.lengths))]))


@dataclass
class MemberMesh:
    """`ElasticDeviceMesh` of a member that gathers with the others, and may lie."""

    place: int
    meeting: Meeting
    forge: dict[int, Callable[[Tensor], object]] = field(default_factory=dict[int, Callable[[Tensor], object]])
    """Applied to what it sends in the gathering of this number."""

    def is_so(self, known: bool) -> bool:
        return known

    def gather(self, request: RoundRequest, gathering: Gathering) -> Transfer:
        sent = request.sent.clone()
        self.forge.get(gathering.number, lambda _: None)(sent)
        self.meeting.gather(self.place, gathering, sent, request.result)
        return Transfer(len(sent), request.result.numel(), took_s=0.0)


@dataclass
class Audited:
    """A round that all members audited."""

    plan: RoundPlan
    said: dict[str, Evidence]
    refused: set[str]
    gatherings: list[int]
    """Numbers of those that it took."""

    def put_out(self) -> set[str]:
        return {m for b in self.blames() if b.consequence == "out" for m in b.members}

    def kept_apart(self) -> set[frozenset[str]]:
        return {frozenset(b.members) for b in self.blames() if b.consequence == "apart"}

    def blames(self) -> Sequence[Any]:
        votes = {m: refusal(m) if m in self.refused else "digest" for m in self.plan.members}
        return judge(self.plan, votes, self.said)


@dataclass
class Lies:
    """What one member does."""

    result: Callable[[Tensor], object] | None = None
    """Changes its own shard, as all get it."""
    forge: dict[int, Callable[[Tensor], object]] = field(default_factory=dict[int, Callable[[Tensor], object]])
    says: Callable[[Evidence], Evidence] = lambda evidence: evidence


HONEST = Lies()


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that meet the shard of the second member, in each round."""
    drawn = torch.tensor(list(int.to_bytes(NUMEL // 4 + 5000, 8, "little")), dtype=torch.uint8)
    monkeypatch.setattr("zeroband.elastic.rounds.audit.new_draw", lambda length: drawn[:length])


@pytest.fixture
def audit(kept_net: KeptNet) -> Iterator[Callable[..., Audited]]:
    """Has four members make a mean by their engines, and audit it."""
    pool = ThreadPoolExecutor(4)

    def run(
        lies: Lies = HONEST,
        liar: int = 1,
        *,
        codec: Codec = CODECS["int8"],
        rule: RobustRule | None = None,
        is_encoded: bool = False,
        has_drawn: bool = False,
        chance: float = 1.0,
        **fields: Any,
    ) -> Audited:
        plan, net = a_plan(**fields), kept_net(4, False)
        shape = shape_of(NUMEL, codec, plan.shares, may_be_ring=False)
        sources = [noise(NUMEL, seed=n) for n in range(4)]
        encoded = [Encoded(codec.encode(s), torch.empty(codec.encoded_size(NUMEL), dtype=torch.uint8)) for s in sources]
        meeting = Meeting(4)
        meshes = [MemberMesh(n, meeting, lies.forge if n == liar else {}) for n in range(4)]
        auditors = [Auditor(cast(Any, mesh), codec, rule, lambda *_: chance) for mesh in meshes]
        results = [torch.empty(NUMEL) for _ in sources]
        shards = list(pairwise(shape.bounds))
        hashes = [PartHashes.of(a.key, 4, *shards[n], shape.chunk_numel) for n, a in enumerate(auditors)]
        operation = net.next_operation()
        running = [
            net.operate(
                operation,
                shape,
                n,
                sources[n],
                results[n],
                hashes=hashes[n],
                encoded=encoded[n] if is_encoded else None,
                robust=None if rule is None else Robustly(rule, 4),
            )
            for n in range(4)
        ]
        assert ends_of(running) == [State.DONE] * 4
        for one in running:
            one.close()
        if lies.result is not None:
            for result in results:
                lies.result(result[slice(*shards[liar])])

        def audited(n: int) -> tuple[bool, Evidence]:
            request = RoundRequest(plan, NODES[n], sources[n], results[n], encoded=encoded[n] if is_encoded else None)
            moved = Transfer(0, 0, took_s=0.0, borders=shape.bounds, hashes=hashes[n])
            told, found = auditors[n].audit(request, moved, [audits.new_draw(8)] * 4 if has_drawn else None)
            return told.is_refused, found.added_to(Evidence(held=tuple("hold" for _ in NODES)))

        done = list(pool.map(audited, range(4)))
        said = {NODES[n]: evidence if n != liar else lies.says(evidence) for n, (_, evidence) in enumerate(done)}
        refuse = {n for n, (is_refused, _) in enumerate(done) if is_refused and not (n == liar and lies.result)}
        return Audited(plan, said, {NODES[n] for n in refuse}, meeting.numbers)

    yield run
    pool.shutdown()


RULES = [None, RobustRule("clip"), RobustRule("trimmed", trim=0.25), RobustRule("centered_clip", iterations=2)]


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name if rule else "mean")
def test_honest_sum_is_confirmed_to_the_last_bit(
    audit: Callable[..., Audited], name: str, rule: RobustRule | None
) -> None:
    audited = audit(codec=CODECS[name], rule=rule, weights=(1, 2, 0, 3))
    assert not audited.refused
    assert all(not e.wrong and not e.denied and len(e.shown) == 4 for e in audited.said.values())
    assert len({evidence.shown for evidence in audited.said.values()}) == 1


@pytest.mark.parametrize(("has_drawn", "chance", "gatherings"), [(True, 0.0, []), (True, 1.0, [3]), (False, 0.0, [2])])
def test_draws_that_came_with_something_else_cost_no_gathering(
    audit: Callable[..., Audited], has_drawn: bool, chance: float, gatherings: list[int]
) -> None:
    assert audit(has_drawn=has_drawn, chance=chance).gatherings == gatherings


def test_round_that_nobody_draws_is_not_audited(audit: Callable[..., Audited]) -> None:
    audited = audit(Lies(one_percent_more), chance=0.0)
    assert not audited.refused and {evidence.shown for evidence in audited.said.values()} == {()}


@pytest.mark.parametrize(
    ("steps", "numel", "chance"),
    [(0, 1000, 0.001), (50, 50_000, 0.015), (0, 1 << 20, 0.16), (10, 1 << 20, 0.32), (10, 1 << 24, 1.0)],
)
def test_audits_of_short_rounds_take_a_hundredth_of_time_and_traffic(steps: int, numel: int, chance: float) -> None:
    plan = a_plan(steps=(steps, steps, 0, steps))
    assert chance_of(plan, numel) == pytest.approx(chance, abs=0.001, rel=0.05)


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
def test_some_draw_of_a_round_hits_as_often_as_it_should(chance: float) -> None:
    draws = torch.randint(0, 256, (2000, 4, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    audited = sum(any(hits(draw, chance, 4) for draw in draws_of_round) for draws_of_round in draws)
    assert audited / len(draws) == pytest.approx(chance, abs=0.03)


def test_what_was_encoded_elsewhere_is_shown_as_it_was_sent(audit: Callable[..., Audited]) -> None:
    assert not audit(is_encoded=True).refused


def one_percent_more(shard: Tensor) -> None:
    shard.mul_(1.01)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name if rule else "mean")
def test_owner_that_adds_one_percent_is_named_by_all_and_put_out(
    audit: Callable[..., Audited], rule: RobustRule | None
) -> None:
    audited = audit(Lies(one_percent_more), rule=rule)
    assert audited.refused == set(NODES) - {"b#1"}
    assert audited.put_out() == {"b#1"} and not audited.kept_apart()


@pytest.mark.parametrize(
    ("byte", "accuser_says"), [(3, ("b#1",)), (0, ())], ids=["much", "so little that sums hide it"]
)
def test_member_that_shows_another_part_than_it_sent_stands_against_the_owner_alone(
    audit: Callable[..., Audited], byte: int, accuser_says: tuple[str, ...]
) -> None:
    """The owner that it frames knows what came, so nobody else's word counts: neither is put out for one."""

    def change(shown: Tensor) -> None:
        shown[byte] ^= 1  # of the first scale

    audited = audit(Lies(forge={3: change}), liar=3)
    assert audited.said["a#1"].wrong == accuser_says and audited.said["b#1"].denied == ("d#1",)
    assert not audited.put_out() and audited.kept_apart() == {frozenset(("b#1", "d#1"))}


def test_owner_that_lies_about_the_sum_and_accuses_all_is_put_out(audit: Callable[..., Audited]) -> None:
    def accuse(evidence: Evidence) -> Evidence:
        return Evidence(evidence.held, shown=evidence.shown, denied=("a#1", "c#1", "d#1"))

    assert audit(Lies(one_percent_more, says=accuse)).put_out() == {"b#1"}


def test_owner_that_lies_and_accuses_one_is_kept_apart_from_it(audit: Callable[..., Audited]) -> None:
    def accuse(evidence: Evidence) -> Evidence:
        return Evidence(evidence.held, shown=evidence.shown, denied=("a#1",))

    audited = audit(Lies(one_percent_more, says=accuse))
    assert not audited.put_out() and audited.kept_apart() == {frozenset(("a#1", "b#1"))}


def test_owner_that_says_it_was_shown_something_else_stands_against_who_showed_it(
    audit: Callable[..., Audited],
) -> None:
    def deny(evidence: Evidence) -> Evidence:
        return Evidence(evidence.held, shown=("other", *evidence.shown[1:]))

    audited = audit(Lies(one_percent_more, says=deny))
    assert not audited.put_out() and audited.kept_apart() == {frozenset(("a#1", "b#1"))}


def test_own_part_of_an_owner_is_no_larger_than_it_announced(audit: Callable[..., Audited]) -> None:
    """Nobody saw it before: what an owner adds to a sum it could else call its own contribution."""
    assert not audit(largest=(5.0, 5.0, 5.0, 5.0)).refused
    audited = audit(largest=(5.0, 0.5, 5.0, 5.0))
    assert all(evidence.wrong == ("b#1",) for evidence in audited.said.values())
