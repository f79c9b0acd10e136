"""Arguments shared by commands: parsers, bounded numbers, units, the choice of a run, exit codes."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroband.errors import ConfigError, StoreLost, ZerobandError

if TYPE_CHECKING:
    from zeroband.observe.facts import FactSource

STORE_VARIABLE, ID_VARIABLE, TOKEN_VARIABLE = "ZERO_BAND_STORE__URL", "ZERO_BAND_RUN__ID", "ZERO_BAND_RUN__TOKEN"
"""Variables that `zeroband store` prints for the machines of a run."""

EXIT_UNREACHED, EXIT_CONFIG = 1, 2


def parser_of(command: str, text: str | None, **more: Any) -> argparse.ArgumentParser:
    """Return the parser of `zeroband COMMAND`: no abbreviated flags; multi-line texts keep their lines."""
    has_lines = text is not None and "\n" in text
    formatter = argparse.RawDescriptionHelpFormatter if has_lines else argparse.HelpFormatter
    prog = f"zeroband {command}"
    return argparse.ArgumentParser(prog=prog, description=text, formatter_class=formatter, allow_abbrev=False, **more)


def bounded(kind: type[int] | type[float], **bounds: float) -> Callable[[str], Any]:
    """Return the argparse type of a finite number with pydantic's bounds ge, gt, le, lt."""

    def parsed(text: str) -> Any:
        # imported lazily: slow, and not needed without such an argument
        from pydantic import TypeAdapter, ValidationError, confloat, conint

        limits: Any = bounds
        allowed: Any = conint(**limits) if kind is int else confloat(**limits, allow_inf_nan=False)
        try:
            return TypeAdapter(allowed).validate_python(text)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise argparse.ArgumentTypeError(f"{text!r}: {said[0].lower()}{said[1:]}") from None

    return parsed


_NUMBER = r"([0-9]+(?:\.[0-9]+)?(?:e[+-]?[0-9]+)?)"
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_SIZES = {"mb": 1e6, "gb": 1e9, "mib": 2.0**20, "gib": 2.0**30}
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}


def parse_count(text: str) -> float:
    """Parse a count of parameters or tokens: `1.5e9`, `150M`, `7B`. Raises ArgumentTypeError."""
    if not 1 <= (count := _number(text, _COUNTS, gap="")) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of 1 or more; write it like 1.5e9, 150M or 7B")
    return count


def parse_rate(text: str) -> float:
    """Parse a link rate, `20mbit`, `2.5gbit/s`, into bytes per second. Raises ArgumentTypeError."""
    if not 0 < (rate := _number(text, _RATES, end="(?:/s)?") / 8) < math.inf:
        wanted = "write it in bits per second like 20mbit or 1gbit"
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate above 0; {wanted}")
    return rate


def parse_size(text: str) -> int:
    """Parse a memory size, `80GB`, `79.6GiB`, into bytes. Raises ArgumentTypeError."""
    if not 1 <= (size := _number(text, _SIZES)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size of memory; write it like 80GB or 79.6GiB")
    return int(size)


def _number(text: str, units: Mapping[str, float], *, gap: str = r"\s*", end: str = "") -> float:
    """Parse a number with a unit; 0 if malformed."""
    match = re.fullmatch(f"{_NUMBER}{gap}({'|'.join(units)}){end}", text.strip().lower())
    return float(match[1]) * units[match[2]] if match else 0.0


def run_command(command: str, work: Callable[[], int]) -> int:
    """Run a command and return its exit code; print a ZerobandError and return its code."""
    try:
        return work()
    except ZerobandError as error:
        print(f"zeroband {command}: {error}", file=sys.stderr)
        return EXIT_UNREACHED if isinstance(error, StoreLost) else EXIT_CONFIG


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a run, as a folder or in a store."""
    parser.add_argument("run_dir", type=Path, nargs="?", help="<run.dir>/<run.id>, for example runs/first")
    add_access(parser)


def add_access(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for a run's store, id and token."""
    parser.add_argument(
        "--store", metavar="URL", nargs="?", const="",
        help=f"the run's store (store.url), to see all nodes; default URL: {STORE_VARIABLE}",
    )  # fmt: skip
    parser.add_argument("--run-id", metavar="ID", help=f"run.id in that store; default: {ID_VARIABLE}")
    parser.add_argument(
        "--token-file", type=Path, metavar="PATH",
        help=f"file with run.token; default: {TOKEN_VARIABLE} or {TOKEN_VARIABLE}_FILE",
    )  # fmt: skip


def is_in_store(options: argparse.Namespace) -> bool:
    """Return whether the arguments name a run in a store."""
    return any(asked is not None for asked in (options.store, options.run_id, options.token_file))


def open_source(options: argparse.Namespace) -> FactSource:
    """Open the run that the arguments name. Raises ConfigError."""
    from zeroband.observe.facts import FolderFacts, find_run_dir  # imported lazily: other commands do not need it

    run_dir: Path | None = options.run_dir
    if run_dir is None and not is_in_store(options):
        raise ConfigError("name one run: its folder (runs/first), or --store URL --run-id ID")
    if run_dir is not None and not is_in_store(options):
        return FolderFacts(find_run_dir(run_dir))
    from zeroband.elastic.store.facts import FolderAndStoreFacts, StoreFacts

    run_id = run_id_of(options)
    far = StoreFacts(store_of(options), run_id, token_of(options))
    return far if run_dir is None else FolderAndStoreFacts(FolderFacts(run_dir), far)


def store_of(options: argparse.Namespace) -> str:
    """Return the store's address from arguments or environment. Raises ConfigError."""
    url: str | None = options.store or os.environ.get(STORE_VARIABLE)
    if url is None:
        raise ConfigError(f"where is the run's store? give --store URL, or set {STORE_VARIABLE}")
    return url


def run_id_of(options: argparse.Namespace) -> str:
    """Return the run's id in its store from arguments or environment. Raises ConfigError."""
    run_dir: Path | None = options.run_dir
    run_id: str | None = options.run_id or (os.environ.get(ID_VARIABLE) if run_dir is None else run_dir.absolute().name)
    if run_id is None:
        raise ConfigError(f"a store may hold several runs: --store needs --run-id, or {ID_VARIABLE}")
    if run_dir is not None and run_id != run_dir.absolute().name:
        raise ConfigError(f"name one run: {run_dir} is not the run of --run-id {run_id}")
    return run_id


def token_of(options: argparse.Namespace) -> str | None:
    """Return the run's token from arguments or environment. Raises ConfigError."""
    from zeroband.config.token_file import read_token

    named = os.environ.get(f"{TOKEN_VARIABLE}_FILE")
    asked: Path | None = getattr(options, "token_file", None)
    token_file = asked or (None if TOKEN_VARIABLE in os.environ or not named else Path(named))
    return os.environ.get(TOKEN_VARIABLE) if token_file is None else read_token(token_file).get_secret_value()


price = bounded(float, ge=0, lt=10**9)
"""Type of --price-per-hour."""
