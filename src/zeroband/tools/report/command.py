"""`zeroband report RUN_DIR`: write the page of a run as one HTML file that works offline and in print.

Exit codes: 0 written; 2 no run, or the file cannot be written.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from zeroband.errors import ConfigError
from zeroband.observe.facts import REPORT_FILE, find_run_dir
from zeroband.tools.arguments import parser_of, price, run_command
from zeroband.tools.board.saved import saved_page
from zeroband.tools.report.record import read_record
from zeroband.tools.report.sections import saved_data


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    parser = parser_of(
        "report",
        "Write the page of a run as one HTML file: curves, rounds, members, data audit, checkpoints, events,\n"
        "configuration, and next steps.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="<run.dir>/<run.id>, with the nodes' folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"file to write (default: RUN_DIR/{REPORT_FILE})")
    parser.add_argument("--price-per-hour", type=price, metavar="PRICE", help="price of a node, to show the run's cost")
    parser.add_argument("--currency", default="USD", metavar="NAME", help="currency of that price (default: USD)")
    options = parser.parse_args(argv)

    def work() -> int:
        run_dir = find_run_dir(options.run_dir)
        out: Path = options.out or run_dir / REPORT_FILE
        write_report(run_dir, out, price_per_hour=options.price_per_hour, currency=options.currency)
        print(out)
        return 0

    return run_command("report", work)


def write_report(run_dir: Path, out: Path, *, price_per_hour: float | None = None, currency: str = "USD") -> None:
    """Write the report of a run atomically. Raises ConfigError if the file cannot be written."""
    record = read_record(run_dir, now_s=time.time(), price_per_hour=price_per_hour, currency=currency)
    draft = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        draft.write_text(saved_page(f"{record.run_id}: report", saved_data(record)), encoding="utf-8")
        draft.replace(out)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write the report to {out}: {error.strerror}; name another file with --out"
        ) from error
