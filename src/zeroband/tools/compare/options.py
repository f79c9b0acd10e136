"""What is to be compared: flags of the command over the [compare] table of its files, read strictly."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast

from zeroband.config.load import load_config
from zeroband.config.presets import config_file
from zeroband.config.sources import parse_toml
from zeroband.errors import ConfigError
from zeroband.tools.compare.claims import Claim, parse_claims
from zeroband.tools.compare.methods import Arm, parse_arms
from zeroband.tools.plan.forecast import Link
from zeroband.tools.plan.units import parse_positive, parse_rate

TABLE = "compare"


@dataclass(frozen=True)
class Options:
    """A whole comparison. The names of the fields are the keys of [compare], and with - for _ the flags."""

    methods: tuple[Arm, ...]
    arguments: tuple[str, ...] = ()
    """Flags of every run, without [outer]: the model, the data, the number of steps."""
    title: str = "Methods between nodes"
    seeds: tuple[int, ...] = (0,)
    """run.seed of the runs: the order of the data. The learning rate is chosen with the first one."""
    nodes: int = 2
    inner_steps: int = 20
    """Inner steps of a round, for methods that have rounds."""
    lrs: tuple[float, ...] = ()
    """Peak learning rates of the inner optimizer to try for every method; empty: the configuration's alone."""
    tries: int = 5
    """Most learning rates for one method, with those that are added until the best one is bracketed."""
    warm_steps: int = 0
    """Steps of the common start, with the batch of all nodes together; 0: from random weights."""
    warm_lr: float | None = None
    """Peak learning rate of the common start; None: the configuration's."""
    points: int = 4
    """Places of a run at which the outer state is kept and evaluated, its end among them."""
    samples: int = 512
    """Held-out samples to evaluate on."""
    link: str = "100mbit,80ms"
    """Link of the simulated wall-clock: the rate of a node's access and the round trip between two."""
    step_s: float | None = None
    """Seconds of an inner step for the simulated wall-clock; None: as measured here."""
    limit_minutes: float = 60.0
    """Longest time of one run; one that takes longer has failed."""
    claims: tuple[Claim, ...] = field(default=())
    """What the figures should show, checked at the end."""
    out: Path = Path("runs/compare")
    """Where the page, the figures and the files of the runs go."""

    @property
    def wan(self) -> Link:
        """The link of the simulated wall-clock."""
        return parse_link(self.link)


def parse_link(text: str) -> Link:
    """`100mbit,80ms`: rate of a node's access in both directions, and round trip. Raises ConfigError."""
    rate, comma, rtt = text.partition(",")
    if not comma or not rtt.strip().endswith("ms"):
        raise ConfigError(f"--link={text!r}: write the rate and the round trip like 100mbit,80ms")
    try:
        bytes_per_s, rtt_ms = parse_rate(rate), parse_positive(rtt.strip().removesuffix("ms"))
    except ConfigError as error:
        raise ConfigError(f"--link: {error}") from None
    return Link(bytes_per_s, bytes_per_s, rtt_ms / 1e3)


def read_options(argv: Sequence[str]) -> Options:
    """The comparison that the arguments ask for. Raises ConfigError."""
    known, rest = _parser().parse_known_args(argv)
    table: dict[str, Any] = {}
    arguments: list[str] = []
    inner_steps: int | None = None
    for argument in rest:
        if argument.startswith("@"):
            content = _read_file(config_file(argument[1:]))
            outer = cast("dict[str, Any]", content.pop("outer", {}))
            inner_steps = outer.get("inner_steps", inner_steps)
            table |= cast("dict[str, Any]", content.pop(TABLE, {}))
            arguments += _as_flags(content)
        elif argument.startswith(("--outer", "--store")):
            raise ConfigError(
                f"{argument}: compare chooses it; settings of a method go behind its name: diloco:KEY=VALUE"
            )
        else:
            arguments.append(argument)
    given = {name: value for name, value in vars(known).items() if value is not None}
    if inner_steps is not None:
        table = {"inner_steps": inner_steps} | table
    options = replace(_options(table | given), arguments=tuple(arguments))
    load_config(options.arguments, {})
    return options


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return parse_toml(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"@{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no valid TOML: {error}") from error


def _as_flags(content: Mapping[str, Any]) -> list[str]:
    """Sections as JSON, values as they are."""
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in content.items()]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="zeroband compare",
        usage="zeroband compare [@file.toml ...] --methods ddp,diloco [options] [--section.key value ...]",
        description="Train with each method from one warm start, on the same data, as real processes on this machine; "
        "choose each method's learning rate by the held-out loss; write a page, figures and a table. An interrupted "
        "comparison goes on where it was. Options may stand in a [compare] table of a file.",
        allow_abbrev=False,
    )
    parser.add_argument("--methods", help="ddp,diloco,demo:k=8: each a name of the table, settings behind it")
    parser.add_argument("--seeds", help="how many (2), or which (0,7)")
    parser.add_argument("--nodes", help="of each run but `single`")
    parser.add_argument("--inner-steps", help="of a round, where there are rounds")
    parser.add_argument("--lrs", help="1e-3,2e-3,4e-3: learning rates to try for every method")
    parser.add_argument("--tries", help="most learning rates for one method")
    parser.add_argument("--warm-steps", help="of the common start; 0: none")
    parser.add_argument("--warm-lr", help="its learning rate")
    parser.add_argument("--points", help="evaluations along a run")
    parser.add_argument("--samples", help="held-out samples of an evaluation")
    parser.add_argument("--link", help="100mbit,80ms: for the simulated wall-clock")
    parser.add_argument("--step-s", help="seconds of an inner step for it")
    parser.add_argument("--limit-minutes", help="of one run")
    parser.add_argument("--title", help="of the page")
    parser.add_argument("--out", help="folder for the page and the runs")
    return parser


def _options(values: Mapping[str, Any]) -> Options:
    """Make options of TOML values or texts of flags. Raises ConfigError."""
    names = {entry.name for entry in fields(Options)} - {"arguments"}
    if unknown := sorted(set(values) - names):
        raise ConfigError(f"[{TABLE}] has no key {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    if "methods" not in values:
        raise ConfigError("--methods is missing: for example ddp,diloco")
    read: dict[str, Any] = {}
    for name, value in values.items():
        try:
            read[name] = _READERS[name](value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{TABLE}.{name}={value!r}: {error}") from error
    options = Options(**read)
    _require_sense(options)
    return options


def _require_sense(options: Options) -> None:
    for name in ("nodes", "inner_steps", "tries", "points", "samples"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{TABLE}.{name}={getattr(options, name)}: it is a number of things, 1 or more")
    if options.warm_steps < 0 or options.limit_minutes <= 0 or min(options.lrs, default=1.0) <= 0:
        raise ConfigError(f"[{TABLE}]: warm_steps is 0 or more, limit_minutes and lrs are above 0")
    if not options.seeds or len(set(options.seeds)) < len(options.seeds) or min(options.seeds) < 0:
        raise ConfigError(f"{TABLE}.seeds={options.seeds}: name each seed once, at least one, from 0 on")
    if len(options.lrs) > options.tries:
        raise ConfigError(f"{TABLE}.tries={options.tries} is below the {len(options.lrs)} learning rates of lrs")
    if options.nodes < 2 and not all(arm.is_alone for arm in options.methods):
        raise ConfigError(f"{TABLE}.nodes={options.nodes}: methods between nodes need two")
    parse_link(options.link)


def _listed(value: Any) -> list[Any]:
    return value.split(",") if isinstance(value, str) else list(value)


def _arms(value: Any) -> tuple[Arm, ...]:
    return parse_arms(_listed(value))


def _lrs(value: Any) -> tuple[float, ...]:
    return tuple(sorted({float(part) for part in _listed(value)}))


def _seeds(value: Any) -> tuple[int, ...]:
    """`2` means seeds 0 and 1; a list names them."""
    if isinstance(value, int) or (isinstance(value, str) and value.isdigit()):
        return tuple(range(int(value)))
    return tuple(int(part) for part in _listed(value))


_READERS: Mapping[str, Any] = {
    "methods": _arms,
    "title": str,
    "seeds": _seeds,
    "nodes": int,
    "inner_steps": int,
    "lrs": _lrs,
    "tries": int,
    "warm_steps": int,
    "warm_lr": float,
    "points": int,
    "samples": int,
    "link": str,
    "step_s": float,
    "limit_minutes": float,
    "claims": parse_claims,
    "out": Path,
}
