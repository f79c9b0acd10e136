"""The tables of metrics and events, and the logs that write them."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroband.observe.events import EVENTS, EVENTS_FILE, EventLog
from zeroband.observe.metrics import (
    METRICS,
    METRICS_FILE,
    SERIES,
    MetricsLog,
    MetricValue,
    ddp_bytes,
    document,
    perplexity,
)


class RecordingSink:
    def __init__(self) -> None:
        self.records: list[dict[str, MetricValue]] = []
        self.is_closed = False

    def write(self, record: Mapping[str, MetricValue]) -> None:
        self.records.append(dict(record))

    def close(self) -> None:
        self.is_closed = True


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_files_have_the_names_that_the_docs_give() -> None:
    assert (METRICS_FILE, EVENTS_FILE) == ("metrics.jsonl", "events.jsonl")


@pytest.mark.parametrize("name", METRICS)
def test_metric_has_a_part_a_unit_and_a_sentence(name: str) -> None:
    assert re.fullmatch(r"(train|eval|outer|data|ckpt|node)/[a-z][a-z_]*(/<source>)?", name)
    assert METRICS[name].unit
    assert re.fullmatch(r".+\.", METRICS[name].meaning)


@pytest.mark.parametrize(
    ("ending", "unit"), [("tokens_per_s", "tokens/s"), ("_bytes", "bytes"), ("wait_s", "s"), ("perplexity", "1")]
)
def test_metrics_named_by_a_unit_are_measured_in_it(ending: str, unit: str) -> None:
    units = [metric.unit.split(" ")[0] for name, metric in METRICS.items() if name.endswith(ending)]
    assert set(units) == {unit}


def test_metrics_log_writes_what_is_known_before_it_returns_and_hands_it_to_sinks_that_it_closes(
    tmp_path: Path,
) -> None:
    first, second = RecordingSink(), RecordingSink()
    log = MetricsLog(tmp_path / "n0", [first, second], now=lambda: 12.3456)
    log.record(3, {"train/loss": 1.25, "outer/digest": "ab", "outer/round": 2})
    known = {"step": 3, "at_s": 12.346, "train/loss": 1.25, "outer/digest": "ab", "outer/round": 2}
    assert lines(tmp_path / "n0" / METRICS_FILE) == [known]
    log.record(4, {"train/loss": 2.0, "train/mfu": None})
    assert lines(tmp_path / "n0" / METRICS_FILE)[1].keys() == {"step", "at_s", "train/loss"}
    assert first.records == second.records == lines(tmp_path / "n0" / METRICS_FILE)
    log.close()
    assert first.is_closed and second.is_closed


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"train/los": 2.0}, r"not in METRICS: train/los$"),
        ({"train/loss": torch.tensor(1.0)}, "not a Python number: train/loss"),
    ],
)
def test_metrics_log_refuses_a_name_that_is_not_in_the_table_and_a_tensor(
    tmp_path: Path, values: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(AssertionError, match=refusal):
        MetricsLog(tmp_path).record(1, values)


def test_event_log_writes_the_event_before_it_returns_and_logs_its_usual_fields_at_its_level(
    tmp_path: Path, heard: Callable[[], list[logging.LogRecord]]
) -> None:
    EventLog(tmp_path / "n0", now=lambda: 5.0).emit("peer_lost", round=3, member_ids=["n2#cd"], lanes=2)
    fields = {"round": 3, "member_ids": ["n2#cd"]}
    assert lines(tmp_path / "n0" / EVENTS_FILE) == [{"at_s": 5.0, "kind": "peer_lost", **fields, "lanes": 2}]
    (record,) = heard()
    assert (record.levelname, record.getMessage(), record.__dict__["fields"]) == ("WARNING", "peer_lost", fields)


@pytest.mark.parametrize(
    ("kind", "fields", "refusal"),
    [
        ("peer_gone", {}, "not in EVENTS: peer_gone"),
        ("run_finished", {"step": 3, "at_s": 1.0}, "at_s is set by the log"),
        *((kind, {}, f"{kind} without {row.fields[0]}") for kind, row in EVENTS.items() if row.fields),
    ],
)
def test_event_log_refuses_an_unknown_kind_an_event_without_its_fields_and_a_time(
    tmp_path: Path, kind: str, fields: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(AssertionError, match=refusal):
        EventLog(tmp_path).emit(kind, **fields)


@pytest.mark.parametrize(
    ("nodes", "parameters", "steps", "expected"),
    [(1, 1000, 5, 0), (2, 1000, 1, 4000), (4, 1000, 1, 6000), (4, 1000, 500, 3_000_000), (3, 1, 3, 16)],
)
def test_ddp_bytes_is_a_ring_of_float32_gradients(nodes: int, parameters: int, steps: int, expected: int) -> None:
    assert ddp_bytes(nodes, parameters, steps) == expected


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices_and_overflows_to_infinity() -> None:
    assert perplexity(math.log(257)) == pytest.approx(257)
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_docs_are_in_step_with_the_tables() -> None:
    docs = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert docs.read_text(encoding="utf-8") == document(), "run: python -m zeroband.observe.metrics > docs/metrics.md"


def test_document_has_a_row_with_equal_cells_for_every_name() -> None:
    rows = [line for line in document().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*METRICS, *EVENTS, *SERIES]
    assert [row.count("|") for row in rows] == [5] * len(METRICS) + [4] * len(EVENTS) + [5] * len(SERIES)
