"""Counters folded from metrics, and what they give over another link, against numbers computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.tools.compare.outcomes import PARAMS, counted

from zeroband.elastic.transport.shape import CROWDED, MESSAGE_S
from zeroband.tools.compare.trial_measures import at_link, measured, payload_ratio
from zeroband.tools.plan.forecast import HEADERS, Link

LINK = Link(up_bytes_per_s=1e6, down_bytes_per_s=1e6, rtt_s=0.1)
LAST_S = 0.4 / 32
"""The last chunk, a sixteenth of a shard, where a node sends 400 kB: to one other of two nodes, or to three of four."""


def line(step: int, step_s: float, **outer: Any) -> dict[str, Any]:
    values = {f"outer/{name}": value for name, value in outer.items()}
    return {"step": step, "train/step_s": step_s, "train/tokens": 100 * step, **values}


def test_counters_are_folded_over_nodes_and_rounds() -> None:
    ends_round = {"round": 1, "sent_bytes": 30, "received_bytes": 40, "blocked_s": 0.6, "apply_s": 0.1}
    one = [line(1, 0.5), line(2, 1.1, **ends_round), line(3, 0.5), line(4, 1.1, **{**ends_round, "round": 2})]
    other = [line(1, 0.5), line(2, 1.1, **{**ends_round, "sent_bytes": 50}), line(3, 0.5), line(4, 1.1)]
    found = measured([one, other])
    assert (found.nodes, found.steps, found.tokens, found.rounds) == (2, 4, 400, 2)
    assert (found.sent_bytes, found.received_bytes, found.peak_bytes) == (55, 60, 50)
    assert (found.step_s, found.wall_s, found.apply_s) == pytest.approx((0.5, 3.2, 0.15))
    assert found.blocked_s == pytest.approx(0.9)
    assert found.compute_utilisation == pytest.approx(2.0 / 3.2)
    assert found.sent_per_token == 55 / 200


def test_line_of_a_flush_is_about_several_rounds() -> None:
    numbers = [(1, 30), (2, 30), (4, 60), (5, 30)]
    found = measured([[line(step, 1.0, round=number, sent_bytes=sent) for step, (number, sent) in enumerate(numbers)]])
    assert (found.rounds, found.sent_bytes, found.peak_bytes) == (5, 150, 30)


def test_steps_that_all_end_rounds_are_counted_without_what_they_were_blocked() -> None:
    """Though the rounds took longer, beside training."""
    ends_round = {"round": 1, "wait_s": 0.3, "transfer_s": 0.4, "blocked_s": 0.35}
    assert measured([[line(1, 0.5, **ends_round), line(2, 0.7, **ends_round)]]).step_s == pytest.approx(0.25)


def test_node_without_metrics_is_an_error() -> None:
    with pytest.raises(ValueError, match="wrote no metrics"):
        measured([[line(1, 0.5)], []])


def test_payload_is_counted_once_however_often_it_was_sent() -> None:
    found = counted(nodes=4, sent=6000.0)  # 100 steps of 2 x 1000 bytes are the reference
    assert payload_ratio(found, PARAMS) == pytest.approx(200_000 / (6000 / 1.5))
    assert payload_ratio(replace(found, payload_bytes=2000.0), PARAMS) == pytest.approx(100)
    assert payload_ratio(replace(found, nodes=1), PARAMS) is None


def test_payloads_are_counted_where_they_are_sent_whatever_the_algorithm_is_called() -> None:
    """An aggregator sends none of its own; a line about two rounds has the payload of the newest."""
    one = [
        line(1, 0.5, round=1, sent_bytes=90, payload_bytes=30),
        line(2, 0.5, round=3, sent_bytes=180, payload_bytes=30),
    ]
    aggregator = [line(1, 0.5, round=1, sent_bytes=200), line(2, 0.5, round=3, sent_bytes=400, payload_bytes=None)]
    assert measured([one, aggregator]).payload_bytes == 90
    assert measured([aggregator]).payload_bytes is None


def test_link_makes_a_round_wait_for_its_bytes() -> None:
    found = counted(nodes=2, rounds=10, sent=4e6)  # 10 steps of 0.1 s, 0.1 s of applying, 400 kB a round
    took_s = HEADERS * (0.4 + LAST_S) + 0.1 + 2 * MESSAGE_S
    predicted = at_link(found, LINK)
    assert predicted.step_s == pytest.approx((1.0 + 0.1 + took_s) / 10)
    assert predicted.compute_utilisation == pytest.approx(1.0 / (1.1 + took_s))
    gathered = at_link(replace(found, payload_bytes=4e6), LINK)
    assert gathered.step_s == pytest.approx((1.1 + HEADERS * 0.4 + 0.1 + MESSAGE_S) / 10)
    crowded = at_link(replace(found, nodes=4), LINK)
    assert crowded.step_s == pytest.approx((1.1 + HEADERS * (CROWDED * 0.4 + LAST_S) + 0.1 + 6 * MESSAGE_S) / 10)


def test_overlap_hides_what_fits_into_a_round() -> None:
    found = counted(nodes=2, rounds=10, sent=4e6)
    assert at_link(found, LINK, overlap_steps=10).step_s == pytest.approx(0.11)
    assert at_link(found, LINK, overlap_steps=2).step_s == pytest.approx(
        0.11 + (HEADERS * (0.4 + LAST_S) + 0.1 - 0.2 + 2 * MESSAGE_S) / 10
    )
    slow = at_link(found, Link(2.5e5, 2.5e5, 0.1), overlap_steps=500)  # a round lasts 1 s
    assert slow.step_s == pytest.approx(0.11 + (HEADERS * 4 * (0.4 + LAST_S) + 0.1 + 2 * MESSAGE_S - 1.0) / 10)


def test_other_machines_step_time_may_be_assumed() -> None:
    found = counted(nodes=2, rounds=10, sent=4e6)
    assert at_link(found, LINK, step_s=2.0).compute_utilisation > 0.95
    alone = counted(nodes=1, rounds=0, sent=0)
    assert at_link(alone, LINK, step_s=2.0).step_s == 2.0
