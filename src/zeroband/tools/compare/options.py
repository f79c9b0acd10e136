"""What is to be compared: flags of the command over the [compare] table of its files, read strictly."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from zeroband.config.load import load_config
from zeroband.config.section import Section
from zeroband.config.sources import config_file, parse_toml
from zeroband.errors import ConfigError
from zeroband.tools.arguments import bounded, parse_rate, parser_of
from zeroband.tools.compare.claims import Claim, parse_claims
from zeroband.tools.compare.methods import Arm, parse_arms
from zeroband.tools.plan.forecast import Link

TABLE = "compare"


def _listed(value: Any) -> Any:
    return value.split(",") if isinstance(value, str) else value


def _arms(value: Any) -> tuple[Arm, ...]:
    return parse_arms(_listed(value))


def _seeds(value: Any) -> Any:
    """`2` means seeds 0 and 1; a list names them."""
    is_number = isinstance(value, int) or (isinstance(value, str) and value.isdigit())
    return range(int(value)) if is_number else _listed(value)


def _each_once(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{TABLE}.seeds={seeds}: name each seed once, at least one, from 0 on")
    return seeds


Rates = Annotated[
    tuple[PositiveFloat, ...], BeforeValidator(_listed), AfterValidator(lambda rates: tuple(sorted(set(rates))))
]
Seeds = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_seeds), AfterValidator(_each_once)]


class CompareOptions(Section):
    """A whole comparison. The names of the fields are the keys of [compare], and with - for _ the flags."""

    arguments: tuple[str, ...] = ()
    """Flags of every run, without [outer]: the model, the data, the number of steps."""
    methods: Annotated[tuple[Arm, ...], BeforeValidator(_arms)]
    """ddp,diloco,demo:k=8: each a name of the table of methods, settings behind it."""
    title: str = "Methods between nodes"
    """Title of the page."""
    seeds: Seeds = (0,)
    """run.seed of the runs, the order of the data: how many (2), or which (0,7). The learning rate is chosen with the
    first one."""
    nodes: PositiveInt = 2
    """Nodes of each run but `single`, and of methods with their own: diloco:nodes=8."""
    global_batch: PositiveInt | None = None
    """Samples of a step over all nodes, the same for every number of them; left out: train.batch_size of each node."""
    inner_steps: PositiveInt = 20
    """Inner steps of a round, for methods that have rounds."""
    lrs: Rates = ()
    """1e-3,2e-3: peak learning rates of the inner optimizer to try for every method; empty: the configuration's."""
    tries: PositiveInt = 5
    """Most learning rates for one method, with those that are added until the best one is bracketed."""
    warm_steps: NonNegativeInt = 0
    """Steps of the common start, with the batch of all nodes together; 0: from random weights."""
    warm_lr: float | None = None
    """Peak learning rate of the common start; left out: the configuration's."""
    points: PositiveInt = 4
    """Places of a run at which the outer state is kept and evaluated, its end among them."""
    samples: PositiveInt = 512
    """Held-out samples to evaluate on."""
    link: str = "100mbit,80ms"
    """Link of the simulated wall-clock: the rate of a node's access and the round trip between two."""
    step_s: float | None = None
    """Seconds of an inner step for the simulated wall-clock; left out: as measured here."""
    limit_minutes: PositiveFloat = 60.0
    """Longest time of one run; one that takes longer has failed."""
    claims: Annotated[tuple[Claim, ...], BeforeValidator(parse_claims)] = ()
    """What the figures should show, checked at the end; in a file alone."""
    results: Path | None = None
    """Folder of the outcomes, to be committed: files with readable names, which stay valid when the code changes and
    say which commit made them; left out: runs/compare-results, where another code makes all runs anew."""
    out: Path = Path("runs/compare")
    """Folder of the page, the figures and the files of the runs."""

    @model_validator(mode="after")
    def _make_sense(self) -> CompareOptions:
        if len(self.lrs) > self.tries:
            raise ConfigError(f"{TABLE}.tries={self.tries} is below the {len(self.lrs)} learning rates of lrs")
        for arm in self.methods:
            if (batch := self.global_batch) is not None and batch % (nodes := self.nodes_of(arm)):
                raise ConfigError(f"{TABLE}.global_batch={batch} is no multiple of the {nodes} nodes of {arm.name}")
        parse_link(self.link)
        return self

    def nodes_of(self, arm: Arm) -> int:
        """Return the number of nodes of a method's runs."""
        return 1 if arm.is_alone else arm.nodes or self.nodes

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
        bytes_per_s, rtt_ms = parse_rate(rate), bounded(float, gt=0)(rtt.strip().removesuffix("ms"))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--link: {error}") from None
    return Link(bytes_per_s, bytes_per_s, rtt_ms / 1e3)


def read_options(argv: Sequence[str]) -> CompareOptions:
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
    options = _options(table | given).model_copy(update={"arguments": tuple(arguments)})
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
    parser = parser_of(
        "compare",
        "Train with each method from one warm start, on the same data, as real processes on this machine; "
        "choose each method's learning rate by the held-out loss; write a page, figures and a table. An interrupted "
        "comparison goes on where it was. Options may stand in a [compare] table of a file.",
        usage="zeroband compare [@file.toml ...] --methods ddp,diloco [options] [--section.key value ...]",
    )
    for name, field in CompareOptions.model_fields.items():
        if name not in ("arguments", "claims"):
            parser.add_argument(f"--{name.replace('_', '-')}", help=field.description)
    return parser


def _options(values: Mapping[str, Any]) -> CompareOptions:
    """Make options of TOML values or texts of flags. Raises ConfigError."""
    names = CompareOptions.model_fields.keys() - {"arguments"}
    if unknown := sorted(values.keys() - names):
        raise ConfigError(f"[{TABLE}] has no key {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    if "methods" not in values:
        raise ConfigError("--methods is missing: for example ddp,diloco")
    try:
        return CompareOptions.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        why = f"{wrong['msg'][0].lower()}{wrong['msg'][1:]}"
        raise ConfigError(f"{TABLE}.{wrong['loc'][0]}={wrong['input']!r}: {why}") from error
