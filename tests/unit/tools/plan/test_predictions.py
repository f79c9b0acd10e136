"""What docs/gpu.md predicts is what the code predicts."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroband.tools.plan.predictions import document

DOCUMENT = Path(__file__).parents[4] / "docs" / "gpu.md"


@pytest.mark.parametrize(
    "presets",
    [
        pytest.param(["150M"], marks=pytest.mark.slow, id="of the first rows"),
        pytest.param([], marks=pytest.mark.soak, id="of all"),  # one of 10B takes as long as a hundred other tests
    ],
)
def test_predictions_of_the_document_are_those_of_the_code(presets: list[str]) -> None:
    assert document(*presets) in DOCUMENT.read_text(encoding="utf-8"), (
        "run: python -m zeroband.tools.plan.predictions, and put it in place of the table in docs/gpu.md"
    )
