"""docs/metrics.md is what the tables say."""

from __future__ import annotations

from pathlib import Path

from zeroband.observe.events import EVENTS
from zeroband.observe.metrics import METRICS
from zeroband.observe.reference import document

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


def test_docs_are_in_step_with_the_tables() -> None:
    assert DOCS.read_text(encoding="utf-8") == document(), "run: python -m zeroband.observe.reference > docs/metrics.md"


def test_document_has_a_row_with_equal_cells_for_every_name() -> None:
    rows = [line for line in document().splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows] == [*METRICS, *EVENTS]
    assert {row.count("|") for row in rows} == {4}
