"""The page's documents: what they cost, how large they get, and of which moment they are."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.made_runs import BEGIN_S, committed, event, joined, member, run_of, step
from tests.made_runs import history_of as history

from zeroband.observe.history import RunHistory
from zeroband.observe.lines import NEWEST_ROUNDS
from zeroband.tools.board import document
from zeroband.tools.board.document import Answer, EncodedPart, Encoder, RunContext, series_document

NODES = ("a", "b", "c")


def answer(encoder: Encoder, made: RunHistory | None, at_s: float | None = None) -> Answer:
    return encoder.state(made, "run", RunContext(), now_s=BEGIN_S, age_s=0.0, at_s=at_s, problem=None)


def state(made: RunHistory, at_s: float | None = None) -> dict[str, Any]:
    return json.loads(answer(Encoder(), made, at_s).body)


@settings(max_examples=30)
@given(st.lists(st.binary(max_size=2000), max_size=5))
def test_compressed_answer_is_what_its_pieces_say(parts: list[bytes]) -> None:
    made = Answer(tuple(map(EncodedPart.of, parts)))
    assert made.body == b"".join(parts)
    assert gzip.decompress(made.gzipped) == made.body
    assert zlib.decompressobj(wbits=31).decompress(made.gzipped) == made.body  # one member, as browsers take it


def test_answers_are_told_apart() -> None:
    pieces = [EncodedPart.of(part) for part in (b"a", b"b")]
    assert Answer((pieces[0],)).etag == Answer((EncodedPart.of(b"a"),)).etag
    assert len({Answer(tuple(chosen)).etag for chosen in (pieces, pieces[::-1], pieces[:1], [])}) == 4


def test_documents_that_follow_one_another_are_as_if_each_were_the_first() -> None:
    """What is kept from one to the next is what would be made anew."""
    encoder, made = Encoder(), RunHistory("run")
    link = {"to": member("b"), "mbit_s": 30, "rtt_ms": 2.5, "is_cut_off": False}
    facts = [
        *(fact for facts in zip(*run_of(NODES, 6), strict=True) for fact in facts),
        event("a", 13, "links", links=[link]),
        event("a", 14, "links", links=[{**link, "is_cut_off": True}]),
        event("a", 15, "peer_lost", round=7, member_ids=[member("b")]),
        *joined("b", 20),
        event("c", 21, "left", reason="asked"),
    ]
    for number, fact in enumerate(facts, 1):
        made.add(fact)
        now = json.loads(answer(encoder, made).body)
        if number % 10 == 0 or number > 55:
            assert now == state(history(facts[:number])), number


def test_one_more_round_is_one_more_to_encode(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there were before: the past costs nothing twice."""
    encoded: list[object] = []
    encode = document.encode
    runs = list(run_of(("a", "b"), 2 * NEWEST_ROUNDS))
    made, encoder = history(fact for facts in runs for fact in facts), Encoder()
    answer(encoder, made)
    monkeypatch.setattr(document, "encode", lambda value: encoded.append(value) or encode(value))
    for node_id in ("a", "b"):
        made.add(committed(node_id, 1000, 2 * NEWEST_ROUNDS + 1, ("a", "b")))
    shown = json.loads(answer(encoder, made).body)
    assert len(shown["rounds"]) == NEWEST_ROUNDS
    assert len(encoded) == 2  # the round, and what is not a list


def test_earlier_moment_is_shown_as_if_what_came_later_were_not_there() -> None:
    link = {"to": member("b"), "mbit_s": 30, "rtt_ms": 2.5, "is_cut_off": False}
    later = [
        event("a", 31, "links", links=[link]),
        event("a", 32, "checkpoint_committed", round=15, step=15, bytes=1, took_s=0.1),
        event("a", 33, "sample_written", path="sample.txt", text="Once"),
        step("a", 34, 16, train__mfu=0.5, node__rss_bytes=7),
        event("b", 35, "peer_lost", round=16, member_ids=[member("c")]),
    ]
    facts = [*(fact for facts in run_of(NODES, 15) for fact in facts), *later]
    facts.sort(key=lambda fact: fact.record["at_s"])
    then, now = state(history(facts), BEGIN_S + 20.5), state(history(facts))
    known = state(history(fact for fact in facts if fact.record["at_s"] <= BEGIN_S + 20.5))
    assert {key for key in then if then[key] != known[key]} <= {"at_s", "to_s", "nodes", "waiting_for", "run"}
    for shown, samples, states, mfu, memory_bytes, standing in (
        (then, None, ["good", "good", "unknown", "unknown"], None, None, "training"),
        (now, "Once", ["good", "good", "good", "unknown"], 0.5, 7, "lost"),
    ):
        assert (shown["sample"] and shown["sample"]["text"], len(shown["links"])) == (samples, bool(samples))
        assert [one["state"] for one in shown["guarantees"]] == states
        assert (shown["nodes"][0]["mfu"], shown["nodes"][0]["memory_bytes"]) == (mfu, memory_bytes)
        assert shown["membership"][2]["spans"][-1][2] == standing
    assert then["guarantees"][0]["evidence"][0].startswith("11 rounds")


def test_time_that_is_left_follows_the_pace_of_the_moment_that_is_shown() -> None:
    slow_from = 20
    facts = [*joined("a", 0)]
    for number in range(41):
        at_s = 2.0 * number + 8.0 * max(0, number - slow_from)
        facts.append(committed("a", at_s, number, ("a",)))
        facts.append(step("a", at_s, number, outer__round=number))
    made = history(facts)
    assert state(made, BEGIN_S + 2 * slow_from)["run"]["left_s"] == pytest.approx(2.0 * 80)
    assert state(made)["run"]["left_s"] == pytest.approx(10.0 * 60)


@pytest.mark.parametrize(
    ("rounds", "more"),
    [
        (400, 800),
        pytest.param(20_000, 1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_documents_do_not_grow_with_rounds(rounds: int, more: int) -> None:
    made, encoder = RunHistory("run"), Encoder()
    for node_id in ("a", "b"):
        for fact in joined(node_id, 0):
            made.add(fact)

    def sizes_after(numbers: range) -> tuple[int, int]:
        for number in numbers:
            for node_id in ("a", "b"):
                at_s = 2.0 * number
                made.add(committed(node_id, at_s, number, ("a", "b")))
                made.add(step(node_id, at_s, number, outer__round=number, outer__sent_bytes=10))
                made.add(event(node_id, at_s, "round_retried", round=number, reason="no"))
                made.add(event(node_id, at_s, "checkpoint_committed", round=number, step=number, bytes=1, took_s=1.0))
        return len(answer(encoder, made).body), len(series_document(made, "tokens", 400))

    full = sizes_after(range(rounds))
    longer = len(str(rounds + more)) / len(str(rounds))  # numbers have more digits
    for before, after in zip(full, sizes_after(range(rounds, rounds + more)), strict=True):
        assert after < 1.3 * longer * before
    shown = json.loads(answer(encoder, made).body)
    assert shown["rounds"][-1]["round"] == shown["run"]["round"] == rounds + more - 1
