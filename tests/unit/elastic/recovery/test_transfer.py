"""Which chunk is given to which donor. Time is an argument here: no test waits."""

from hypothesis import given
from hypothesis import strategies as st

from zeroband.elastic.recovery.state_chunks import Chunk
from zeroband.elastic.recovery.transfer import ChunkQueue

CHUNKS = [Chunk("params", index) for index in range(3)]


def test_chunk_that_was_given_back_is_the_next_one() -> None:
    chunks = ChunkQueue(CHUNKS, straggler_s=1.0)
    first = chunks.take("a", 0.0)
    assert first == CHUNKS[0]
    chunks.give_back("a", first)
    assert chunks.take("b", 0.0) == first


def test_late_chunk_is_given_to_another_donor_and_the_first_copy_wins() -> None:
    chunks = ChunkQueue(CHUNKS[:1], straggler_s=1.0)
    chunks.take("slow", 0.0)
    assert chunks.take("fast", 1.0) is None
    assert chunks.take("slow", 100.0) is None, "the same donor is not asked for it again"
    assert chunks.take("fast", 1.1) == CHUNKS[0]
    assert chunks.finish("fast", CHUNKS[0], 1.2)
    assert not chunks.finish("slow", CHUNKS[0], 1.3)
    chunks.give_back("slow", CHUNKS[0])
    assert chunks.is_done


def test_chunk_is_late_when_it_takes_twice_as_long_as_usual() -> None:
    chunks = ChunkQueue(CHUNKS, straggler_s=1.0)
    for chunk in CHUNKS[:2]:
        assert chunks.take("fast", 0.0) == chunk
        chunks.finish("fast", chunk, 5.0)
    chunks.take("slow", 5.0)
    assert chunks.take("fast", 14.9) is None
    assert chunks.take("fast", 15.1) == CHUNKS[2]


def test_the_longest_on_its_way_is_the_first_straggler() -> None:
    chunks = ChunkQueue(CHUNKS[:2], straggler_s=1.0)
    chunks.take("a", 0.0)
    chunks.take("b", 0.5)
    assert chunks.take("c", 10.0) == CHUNKS[0]
    assert chunks.take("c", 10.0) == CHUNKS[1]
    assert chunks.take("d", 10.5) is None


def test_chunk_waits_again_only_when_all_who_had_it_gave_it_back() -> None:
    chunks = ChunkQueue(CHUNKS[:1], straggler_s=1.0)
    chunks.take("a", 0.0)
    chunks.take("b", 2.0)
    chunks.give_back("a", CHUNKS[0])
    assert chunks.take("c", 2.0) is None
    chunks.give_back("b", CHUNKS[0])
    assert chunks.take("c", 2.0) == CHUNKS[0]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.floats(0, 3)), max_size=60))
def test_every_chunk_is_either_missing_or_finished_exactly_once(steps: list[tuple[str, bool, float]]) -> None:
    chunks, now_s, finished = ChunkQueue(CHUNKS, straggler_s=1.0), 0.0, list[Chunk]()
    at_work: list[tuple[str, Chunk]] = []
    for donor, succeeds, passed_s in steps:
        now_s += passed_s
        chunk = chunks.take(donor, now_s)
        if chunk is not None:
            at_work.append((donor, chunk))
        elif at_work:
            worker, mine = at_work.pop(0)
            if not succeeds:
                chunks.give_back(worker, mine)
            elif chunks.finish(worker, mine, now_s):
                finished.append(mine)
        assert sorted([*finished, *chunks.missing]) == CHUNKS
        assert chunks.is_done == (len(finished) == len(CHUNKS))
