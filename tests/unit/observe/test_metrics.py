"""The table of metrics, and the log that writes it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from zeroband.observe.events import EVENTS
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


def lines(node_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (node_dir / METRICS_FILE).read_text().splitlines()]


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


def test_metrics_log_writes_the_record_before_it_returns(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "n0", now=lambda: 12.3456)
    log.record(3, {"train/loss": 1.25, "outer/digest": "ab", "outer/round": 2})
    assert lines(tmp_path / "n0") == [
        {"step": 3, "at_s": 12.346, "train/loss": 1.25, "outer/digest": "ab", "outer/round": 2}
    ]


def test_metrics_log_hands_every_sink_the_record_of_the_file(tmp_path: Path) -> None:
    first, second = RecordingSink(), RecordingSink()
    log = MetricsLog(tmp_path, [first, second])
    log.record(1, {"train/loss": 2.0})
    log.record(2, {"train/loss": 1.0, "train/mfu": 0.5})
    assert first.records == second.records == lines(tmp_path)


def test_metrics_log_leaves_out_what_is_unknown(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.record(1, {"train/loss": 2.0, "train/mfu": None})
    assert lines(tmp_path)[0].keys() == {"step", "at_s", "train/loss"}


def test_metrics_log_refuses_a_name_that_is_not_in_the_table(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"not in METRICS: train/los$"):
        MetricsLog(tmp_path).record(1, {"train/los": 2.0})


def test_metrics_log_refuses_a_tensor(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="not a Python number: train/loss"):
        MetricsLog(tmp_path).record(1, {"train/loss": torch.tensor(1.0)})  # type: ignore[dict-item]


def test_metrics_log_closes_every_sink(tmp_path: Path) -> None:
    sink = RecordingSink()
    MetricsLog(tmp_path, [sink]).close()
    assert sink.is_closed


@pytest.mark.parametrize(
    ("nodes", "parameters", "steps", "expected"),
    [(1, 1000, 5, 0), (2, 1000, 1, 4000), (4, 1000, 1, 6000), (4, 1000, 500, 3_000_000), (3, 1, 3, 16)],
)
def test_ddp_bytes_is_a_ring_of_float32_gradients(nodes: int, parameters: int, steps: int, expected: int) -> None:
    assert ddp_bytes(nodes, parameters, steps) == expected


def test_perplexity_of_a_uniform_guess_is_the_number_of_choices() -> None:
    assert perplexity(math.log(257)) == pytest.approx(257)


def test_perplexity_overflows_to_infinity_and_keeps_nan() -> None:
    assert perplexity(1e6) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_docs_are_in_step_with_the_tables() -> None:
    docs = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert docs.read_text(encoding="utf-8") == document(), "run: python -m zeroband.observe.metrics > docs/metrics.md"


def test_document_has_a_row_with_equal_cells_for_every_name() -> None:
    rows = [line for line in document().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*METRICS, *EVENTS, *SERIES]
    assert [row.count("|") for row in rows] == [5] * len(METRICS) + [4] * len(EVENTS) + [5] * len(SERIES)
