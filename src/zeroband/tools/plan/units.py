"""Numbers with units as people type them, read strictly, and times as people say them. Pure."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SIZES = {"mb": 1e6, "gb": 1e9, "mib": 2.0**20, "gib": 2.0**30}
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def parse_count(text: str) -> float:
    """`1e9`, `1.5e9`, `150M`, `7B`: a number of parameters or tokens, 1 or more. Raises ArgumentTypeError."""
    match = re.fullmatch(_NUMBER + r"([kmbt]?)", text.strip().lower())
    count = float(match[1]) * _COUNTS[match[2]] if match else 0.0
    if count < 1 or count == float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a count of 1 or more; write it like 1.5e9, 150M or 7B")
    return count


def parse_rate(text: str) -> float:
    """`20mbit`, `1gbit`, `2.5gbit/s`: the rate of a link, in bytes a second. Raises ArgumentTypeError."""
    match = re.fullmatch(_NUMBER + r"\s*(kbit|mbit|gbit|tbit)(?:/s)?", text.strip().lower())
    rate = float(match[1]) * _RATES[match[2]] / 8 if match else 0.0
    if rate <= 0 or rate == float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a rate above 0; write it in bits a second like 20mbit or 1gbit")
    return rate


def parse_size(text: str) -> int:
    """`80GB`, `79.6GiB`: bytes of memory. Raises ArgumentTypeError."""
    match = re.fullmatch(_NUMBER + r"\s*(mb|gb|mib|gib)", text.strip().lower())
    size = float(match[1]) * _SIZES[match[2]] if match else 0.0
    if size < 1 or size == float("inf"):
        raise ArgumentTypeError(f"{text!r} is not a size of memory; write it like 80GB or 79.6GiB")
    return int(size)


def human_time(seconds: float) -> str:
    """A duration in the unit that a person would take: `3.4 ms`, `7.42 s`, `54 min`, `5.4 h`, `12 days`."""
    if seconds == 0:
        return "0 s"
    if seconds < 0.0995:
        return f"{1e3 * seconds:.2g} ms"
    if seconds < 89.5:
        return f"{seconds:.3g} s"
    for size_s, unit, most in ((_MINUTE_S, "min", 90), (_HOUR_S, "h", 48), (_DAY_S, "days", math.inf)):
        count = seconds / size_s
        if count < most:
            return f"{count:.2g} {unit}" if count < 9.95 else f"{count:.0f} {unit}"
    return "for ever"
