"""An outer algorithm from a user's file: `outer.type = "custom"`.

The file defines `ALGORITHM = CLASS`: an `Algorithm`, whose rounds are many inner steps, or a `StepAlgorithm`, which
synchronises at each one and has outer.inner_steps = 1. The class is called with the node's `OuterParts`, the [outer]
section and the settings, validated as its `Settings`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from zeroband.config.outer import CustomConfig
from zeroband.config.section import Section, key_value
from zeroband.elastic.rounds.exchange import Exchange
from zeroband.errors import ConfigError
from zeroband.node.user_file import load_file
from zeroband.outer.algorithm import Algorithm, AnyAlgorithm, StepAlgorithm
from zeroband.outer.schedule import Schedule

_NAME = "ALGORITHM"
_PAGE = "docs/tutorials/write-an-algorithm.md"
_OF_OLD = ("take_step", "sync_gradients", "sync_parameters")
"""Methods of the earlier form of algorithms, which were schedules themselves."""


@dataclass(frozen=True)
class CustomAlgorithm:
    """The algorithm in a user's file."""

    build: type[AnyAlgorithm]
    settings: Section
    digest: str
    """Digest of the file, which must be equal on all nodes."""
    sections: tuple[str, ...]
    """Names of the sections of its outer state."""

    @property
    def is_every_step(self) -> bool:
        """Whether all nodes hold the same model and inner optimizer at every step, for any number of ranks."""
        return issubclass(self.build, StepAlgorithm)


def load_algorithm(config: CustomConfig) -> CustomAlgorithm:
    """Load the algorithm that a section names. Raises ConfigError if the file has none or refuses the settings."""
    file = load_file(Path(config.algorithm), "outer.algorithm")
    algorithm = _algorithm_in(file.module, config.algorithm)
    if issubclass(algorithm, StepAlgorithm):
        _require_single_steps(config)
    elif config.merge == "eager" and getattr(algorithm, "outer_sgd", None) is None:
        raise ConfigError(
            f'outer.algorithm={config.algorithm!r}: outer.merge = "eager" needs an outer step that is SGD '
            "(`outer_sgd`), so that what counted at once can be taken out again; set outer.merge = "
            '"overwrite" or "mix"'
        )
    settings = _settings(config, algorithm.Settings)
    return CustomAlgorithm(algorithm, settings, file.digest, tuple(algorithm.sections))


def _algorithm_in(module: object, path: str) -> type[AnyAlgorithm]:
    """The class that a file names. Raises ConfigError if it is no algorithm, or has an earlier version's form."""
    found = getattr(module, _NAME, None)
    is_class = isinstance(found, type)
    if is_class and (issubclass(found, Schedule) or any(hasattr(found, name) for name in _OF_OLD)):
        raise ConfigError(
            f"outer.algorithm={path!r}: its {_NAME} has the form of an earlier version; make it an Algorithm with "
            f"`step` in place of `take_step`, or a StepAlgorithm, as {_PAGE} shows"
        )
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if not (is_class and issubclass(found, Algorithm | StepAlgorithm)) or missing:
        what = f"has no {', '.join(missing)}" if missing else "is no Algorithm"
        raise ConfigError(
            f"outer.algorithm={path!r}: its {_NAME} {what}; "
            f"end the file with {_NAME} = CLASS, such as an Algorithm (zeroband/outer/algorithm.py)"
        )
    return found


def _require_single_steps(config: CustomConfig) -> None:
    """Raise ConfigError if samples would be dealt for rounds of more than one inner step."""
    waits = config.straggler_deadline_s, config.straggler_grace
    schedule = config.inner_steps, config.inner_seconds, config.fragments, config.overlap
    if schedule != (1, None, 1, 0) or waits != (None, None):
        raise ConfigError(
            f"outer.algorithm={config.algorithm!r} is a StepAlgorithm, whose rounds are one inner step; set "
            "outer.inner_steps = 1, and neither outer.inner_seconds, outer.straggler_deadline_s, "
            "outer.straggler_grace, outer.fragments nor outer.overlap"
        )
    if config.robust is not None:
        raise ConfigError(
            f"outer.algorithm={config.algorithm!r} is a StepAlgorithm; outer.robust is for many inner steps"
        )


def require_robust(config: CustomConfig, exchange: Exchange) -> None:
    """Raise ConfigError if outer.robust is set and the algorithm's own exchange ignores it."""
    if config.robust is not None and not exchange.is_robust:
        raise ConfigError(
            f"outer.algorithm={config.algorithm!r} has its own exchange, which outer.robust does not change; drop "
            "outer.robust"
        )


def _settings(config: CustomConfig, kind: type[Section]) -> Section:
    try:
        values = dict(key_value(text) for text in config.settings)
    except ValueError as error:
        raise ConfigError(f"outer.settings: {error}") from error
    try:
        return kind(**values)
    except ValidationError as error:
        given, known = json.dumps(config.settings), ", ".join(kind.model_fields) or "none"
        said = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        raise ConfigError(f"outer.settings={given}: {said}; {config.algorithm} has {known}") from error
