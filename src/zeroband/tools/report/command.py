"""`zeroband report RUN_DIR`: one HTML file that says what a run did, for a browser without network, and for paper.

Exit codes: 0 written; 2 there is no run, or the file cannot be written.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zeroband import __version__
from zeroband.errors import ConfigError
from zeroband.observe.facts import REPORT_FILE
from zeroband.observe.status import find_run_dir
from zeroband.tools.report.facts_in_words import Cost, node_hours
from zeroband.tools.report.page import page
from zeroband.tools.report.record import read_record

_EXIT_CONFIG = 2


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        run_dir = find_run_dir(options.run_dir)
        out: Path = options.out or run_dir / REPORT_FILE
        write_report(run_dir, out, price_per_hour=options.price_per_hour, currency=options.currency)
    except ConfigError as error:
        print(f"zeroband: {error}", file=sys.stderr)
        return _EXIT_CONFIG
    print(out)
    return 0


def write_report(run_dir: Path, out: Path, *, price_per_hour: float | None = None, currency: str = "USD") -> None:
    """Write the report of a run, all of it or nothing. Raises ConfigError where the file cannot be written."""
    record = read_record(run_dir, now_s=time.time(), version=__version__)
    cost = None
    if price_per_hour is not None:
        hours = node_hours(record.history.membership(), record.history.to_s)
        cost = Cost(hours, price_per_hour, currency)
    beside = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        beside.write_text(page(record, cost), encoding="utf-8")
        beside.replace(out)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write the report to {out}: {error.strerror}; name another file with --out"
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroband report",
        description="Write one HTML file with everything that the nodes of a run recorded: curves, rounds, members, "
        "the data audit, checkpoints, events, configuration, and what to do next.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="<run.dir>/<run.id>, with the nodes' folders")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"file to write (default: RUN_DIR/{REPORT_FILE})")
    parser.add_argument("--price-per-hour", type=_price, metavar="PRICE", help="of one node; adds what the run cost")
    parser.add_argument("--currency", default="USD", metavar="NAME", help="of that price (default: USD)")
    return parser


def _price(text: str) -> float:
    price = float(text)
    if not 0 <= price < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is no price")
    return price
