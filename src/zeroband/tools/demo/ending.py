"""The last words of the demo: what was shown, and how to do it for real. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from zeroband.observe.commands import typed
from zeroband.observe.status import sent_in_words
from zeroband.observe.view import RunView

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
    first, last = ("-" if loss is None else f"{loss:.3f}" for loss in (run.first_loss, run.loss))
    digests = final_digests(run, node_ids)
    verdict = f"equal on all {len(digests)} nodes" if is_one_state(digests) else "DIFFERENT: this is a defect"
    lines = [
        f"Done in {took_s:.0f} s.",
        "",
        f"loss         {first} -> {last} nats per token",
        f"sent         {sent_in_words(run)}",
        f"outer state  at the end, {verdict}:",
        *(f"             {node_id}  {digest or 'never held one'}" for node_id, digest in digests.items()),
        f"files        {run_dir}",
        f"             look at them again: {typed('board', run_dir)}, or {typed('status', run_dir)}",
        *([f"report       {report}"] if report is not None else []),
    ]
    if sample is not None:
        lines += ["", "What the model writes:", textwrap.indent(sample.rstrip(), "  | ", lambda line: True)]
    return "\n".join([*lines, "", _FOR_REAL])
