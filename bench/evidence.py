"""What a measurement needs before it prints a figure: that something was measured. Else it ends with 1 or 2."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence


def count(text: str) -> int:
    """Type of an argument that says how often something is measured, or how much of it."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} measures nothing; give 1 or more")
    return number


def require_known(parser: argparse.ArgumentParser, asked: Sequence[str], known: Collection[str]) -> None:
    """End with 2 where a measurement is asked for that there is not."""
    for what in asked:
        if what not in known:
            parser.error(f"{what!r} measures nothing; there are {', '.join(known)}")


def require(is_there: bool, what: str) -> None:
    """End with 1, and say what is missing, where there is nothing to conclude from."""
    if not is_there:
        raise SystemExit(f"nothing was measured: {what}")


def finite(value: float, what: str) -> float:
    """A figure; ends with 1 where it is none."""
    require(math.isfinite(value), f"{what} is {value}")
    return value
