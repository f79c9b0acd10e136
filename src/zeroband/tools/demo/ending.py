"""The last words of the demo: what was shown, and how to do it for real. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from zeroband.observe.status import sent_in_words
from zeroband.observe.view import RunView

_LAST_POINTS = 5
"""Points at the end of a loss curve whose mean is shown as the last loss: one batch alone is noisy."""

_FOR_REAL = """\
For real, on a machine that all others reach under the address HOST:
  uv run zeroband store --host HOST --run-id first
and on every machine, behind the three lines that this prints:
  uv run zeroband launch @150M
A machine that comes later joins, one that dies is left behind. Other texts and settings for this demo:
  ./scripts/demo.sh --data.source.paths 'my/texts/*.txt' --train.total_steps 1000"""


def final_digests(run: RunView, node_ids: Sequence[str]) -> dict[str, str | None]:
    """Digest of the outer state that each node held at last; None for a node that never held one."""
    held = {node.node_id: node.digest for node in run.nodes}
    return {node_id: held.get(node_id) for node_id in node_ids}


def is_one_state(digests: Mapping[str, str | None]) -> bool:
    """Whether every node holds the same outer state."""
    return None not in digests.values() and len(set(digests.values())) == 1


def first_and_last_loss(run: RunView) -> tuple[float, float]:
    """Mean loss of the nodes at their first step and over their last ones; not a number where none has trained."""
    first = [node.first_loss for node in run.nodes if node.first_loss is not None]
    last = [fmean(node.loss_curve[-_LAST_POINTS:]) for node in run.nodes if node.loss_curve]
    return (fmean(first), fmean(last)) if first and last else (math.nan, math.nan)


def epilogue(
    run: RunView,
    node_ids: Sequence[str],
    *,
    run_dir: Path,
    sample: str | None,
    took_s: float,
    report: Path | None = None,
) -> str:
    """Write everything that the demo prints when it is over."""
    first, last = first_and_last_loss(run)
    digests = final_digests(run, node_ids)
    verdict = f"equal on all {len(digests)} nodes" if is_one_state(digests) else "DIFFERENT: this is a defect"
    lines = [
        f"Done in {took_s:.0f} s.",
        "",
        f"loss         {first:.2f} -> {last:.2f} nats per token",
        f"sent         {sent_in_words(run)}",
        f"outer state  at the end, {verdict}:",
        *(f"             {node_id}  {digest or 'never held one'}" for node_id, digest in digests.items()),
        f"files        {run_dir}",
        f"             look at them again: zeroband board {run_dir}, or zeroband status {run_dir}",
        *([f"report       {report}"] if report is not None else []),
    ]
    if sample is not None:
        lines += ["", "What the model writes:", textwrap.indent(sample.rstrip(), "  | ", lambda line: True)]
    return "\n".join([*lines, "", _FOR_REAL])
