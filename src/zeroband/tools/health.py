"""`zeroband health [RUN_DIR]`: check that the trainers on this machine are alive and making progress. Linux.

For container health checks: cheap, read-only, without torch or store. The checks are in `runtime/health.py`.
Exit codes: 0 all are healthy; 1 there is none, or one is stopped, dead or stalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeroband.runtime.health import problems_of, ranks_in
from zeroband.tools.arguments import parser_of


def main(argv: Sequence[str]) -> int:
    """Check and print problems. Returns the exit code."""
    parser = parser_of("health", __doc__)
    parser.add_argument("run_dir", type=Path, nargs="?", help="only nodes that write below this folder")
    asked: Path | None = parser.parse_args(argv).run_dir
    below = None if asked is None else asked.resolve()
    ranks = [rank for rank in ranks_in(Path("/proc")) if below is None or rank[1].is_relative_to(below)]
    found = list(problems_of(ranks)) if ranks else ["no trainer runs here"]
    print("\n".join(found or [f"well: {', '.join(sorted({node_dir.name for _, node_dir in ranks}))}"]))
    return 1 if found else 0
