"""`zeroband health [RUN_DIR]`: whether the trainers on this machine live and get on. Linux; loads no torch.

For health checks of containers: cheap, knows no store, changes nothing. What it looks at:
`runtime/health.py`. Exit codes: 0 all are well; 1 there is none, or one is stopped, dead or stalled.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zeroband.runtime.health import problems_of, ranks_in
from zeroband.tools.arguments import parser_of


def main(argv: Sequence[str]) -> int:
    """Look, and say what is wrong. Returns the exit code."""
    parser = parser_of("health", __doc__)
    parser.add_argument("run_dir", type=Path, nargs="?", help="only of nodes that write below this folder")
    asked: Path | None = parser.parse_args(argv).run_dir
    below = None if asked is None else asked.resolve()
    ranks = [rank for rank in ranks_in(Path("/proc")) if below is None or rank[1].is_relative_to(below)]
    found = list(problems_of(ranks)) if ranks else ["no trainer runs here"]
    print("\n".join(found or [f"well: {', '.join(sorted({node_dir.name for _, node_dir in ranks}))}"]))
    return 1 if found else 0
