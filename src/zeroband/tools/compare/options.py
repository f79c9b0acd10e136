"""Options of a comparison: flags override the [compare] table of files; unknown keys are errors."""

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
from zeroband.config.section import Section, meanings
from zeroband.config.sources import TomlFile, config_file
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
    """Parse `2` as seeds 0 and 1, or a list of seeds."""
    is_number = isinstance(value, int) or (isinstance(value, str) and value.isdigit())
    return range(int(value)) if is_number else _listed(value)


def _each_once(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{TABLE}.seeds={seeds}: give one or more distinct seeds from 0 on")
    return seeds


Rates = Annotated[
    tuple[PositiveFloat, ...], BeforeValidator(_listed), AfterValidator(lambda rates: tuple(sorted(set(rates))))
]
Seeds = Annotated[tuple[NonNegativeInt, ...], BeforeValidator(_seeds), AfterValidator(_each_once)]


class CompareOptions(Section):
    """Options of a comparison; fields are the keys of [compare] and, with - for _, the flags."""

    arguments: tuple[str, ...] = ()
    """Flags of every run, without [outer]: the model, the data, the number of steps."""
    methods: Annotated[tuple[Arm, ...], BeforeValidator(_arms)]
    """Methods with settings: ddp,diloco,demo:k=8."""
    title: str = "Methods between nodes"
    """Title of the report."""
    seeds: Seeds = (0,)
    """run.seed of the runs, the order of the data: a number (2) or a list (0,7). Learning rates are chosen with the
    first one."""
    nodes: PositiveInt = 2
    """Nodes per run, except for `single` and methods with their own, diloco:nodes=8."""
    global_batch: PositiveInt | None = None
    """Samples per step over all nodes, whatever their number; default: train.batch_size of each node."""
    inner_steps: PositiveInt = 20
    """Inner steps per round, for methods with rounds."""
    lrs: Rates = ()
    """Peak learning rates of the inner optimizer to try: 1e-3,2e-3; default: the configuration's."""
    tries: PositiveInt = 5
    """Maximum number of learning rates per method, including those added until the best is bracketed."""
    warm_steps: NonNegativeInt = 0
    """Steps of the common start, with the batch of all nodes together; 0: random weights."""
    warm_lr: float | None = None
    """Peak learning rate of the common start; default: the configuration's."""
    points: PositiveInt = 4
    """Number of evaluations of the outer state during a run, including its end."""
    samples: PositiveInt = 512
    """Held-out samples to evaluate on."""
    link: str = "100mbit,80ms"
    """Link for the simulated wall-clock time: rate of a node's access and round trip."""
    step_s: float | None = None
    """Seconds of an inner step for the simulated wall-clock time; default: as measured here."""
    limit_minutes: PositiveFloat = 60.0
    """Time limit of a run; a longer run fails."""
    claims: Annotated[tuple[Claim, ...], BeforeValidator(parse_claims)] = ()
    """Claims to check at the end; only in a file."""
    results: Path | None = None
    """Folder for results to commit: readable names, valid when the code changes; default: runs/compare-results, where
    other code makes all runs anew."""
    out: Path = Path("runs/compare")
    """Folder of the report, the figures and the runs' files."""

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
    """Parse `100mbit,80ms`: rate in both directions and round trip. Raises ConfigError."""
    rate, comma, rtt = text.partition(",")
    if not comma or not rtt.strip().endswith("ms"):
        raise ConfigError(f"--link={text!r}: write the rate and the round trip like 100mbit,80ms")
    try:
        bytes_per_s, rtt_ms = parse_rate(rate), bounded(float, gt=0)(rtt.strip().removesuffix("ms"))
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"--link: {error}") from None
    return Link(bytes_per_s, bytes_per_s, rtt_ms / 1e3)


def read_options(argv: Sequence[str]) -> CompareOptions:
    """Return the options. Raises ConfigError."""
    known, rest = _parser().parse_known_args(argv)
    table: dict[str, Any] = {}
    arguments: list[str] = []
    inner_steps: int | None = None
    for argument in rest:
        if argument.startswith("@"):
            content = TomlFile(config_file(argument[1:]))()
            outer = cast("dict[str, Any]", content.pop("outer", {}))
            inner_steps = outer.get("inner_steps", inner_steps)
            table |= cast("dict[str, Any]", content.pop(TABLE, {}))
            arguments += _as_flags(content)
        elif argument.startswith(("--outer", "--store")):
            raise ConfigError(
                f"{argument}: compare sets it; give settings of a method after its name: diloco:KEY=VALUE"
            )
        else:
            arguments.append(argument)
    given = {name: value for name, value in vars(known).items() if value is not None}
    if inner_steps is not None:
        table = {"inner_steps": inner_steps} | table
    options = _options(table | given).model_copy(update={"arguments": tuple(arguments)})
    load_config(options.arguments, {})
    return options


def _as_flags(content: Mapping[str, Any]) -> list[str]:
    """Return flags: sections as JSON, values unchanged."""
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in content.items()]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "compare",
        "Train with each method from one warm start on the same data, as real processes on this machine; choose each "
        "method's learning rate by held-out loss; write a table and figures. An interrupted comparison resumes. "
        "Options can also be set in a [compare] table of a file.",
        usage="zeroband compare [@file.toml ...] --methods ddp,diloco [options] [--section.key value ...]",
    )
    for name in CompareOptions.model_fields:
        if name not in ("arguments", "claims"):
            parser.add_argument(f"--{name.replace('_', '-')}", help=meanings(CompareOptions)[name])
    return parser


def _options(values: Mapping[str, Any]) -> CompareOptions:
    """Validate TOML values or flags. Raises ConfigError."""
    names = CompareOptions.model_fields.keys() - {"arguments"}
    if unknown := sorted(values.keys() - names):
        raise ConfigError(f"[{TABLE}] has no key {', '.join(unknown)}; known: {', '.join(sorted(names))}")
    if "methods" not in values:
        raise ConfigError("--methods is missing: for example ddp,diloco")
    try:
        return CompareOptions.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()[0]
        why = f"{wrong['msg'][0].lower()}{wrong['msg'][1:]}"
        raise ConfigError(f"{TABLE}.{wrong['loc'][0]}={wrong['input']!r}: {why}") from error
