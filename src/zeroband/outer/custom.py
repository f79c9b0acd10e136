"""An outer algorithm from a file of its own: `outer.type = "custom"`.

The file says `ALGORITHM = CLASS`: an `OuterAlgorithm` that is called with `OuterParts`, the [outer] section and the
settings, validated as its `Settings`. `ManySteps` is the base of those whose rounds are many inner steps, `EveryStep`
of those that synchronise at each one; of the latter outer.inner_steps is 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from zeroband.config.outer import CustomConfig
from zeroband.config.section import Section, key_value
from zeroband.elastic.rounds.interfaces import OuterAlgorithm, OuterParts
from zeroband.errors import ConfigError
from zeroband.node.user_file import load_file
from zeroband.outer.every_step import EveryStep

_NAME = "ALGORITHM"
_NEEDED = (
    *("sections", "sync_gradients", "sync_parameters", "found", "join", "adopt", "replay", "copy_state"),
    *("learned", "is_boundary"),
)


@dataclass(frozen=True)
class CustomAlgorithm:
    """What a file holds."""

    build: Callable[[OuterParts, CustomConfig, Section], OuterAlgorithm]
    settings: Section
    digest: str
    """Digest of the file, which all nodes must have alike."""
    sections: tuple[str, ...]
    """Names of the sections of its outer state."""
    is_every_step: bool
    """All nodes hold one model and the inner optimizer's state at every step, whatever the number of their ranks."""


def load_algorithm(config: CustomConfig) -> CustomAlgorithm:
    """The algorithm that a section names. Raises ConfigError where the file has none, or refuses the settings."""
    file = load_file(Path(config.algorithm), "outer.algorithm")
    found = getattr(file.module, _NAME, None)
    missing = [name for name in _NEEDED if not hasattr(found, name)]
    missing += sorted(getattr(found, "__abstractmethods__", ()))
    if not isinstance(found, type) or missing:
        what = f"has no {', '.join(missing)}" if isinstance(found, type) else "is no class"
        raise ConfigError(
            f"outer.algorithm={config.algorithm!r}: its {_NAME} {what}; "
            f"end the file with {_NAME} = CLASS, such as a ManySteps (zeroband/outer/many_steps.py)"
        )
    algorithm: Any = found
    is_every_step = issubclass(found, EveryStep)
    if is_every_step:
        _require_single_steps(config)
    elif config.merge == "eager" and getattr(algorithm, "outer_sgd", None) is None:
        raise ConfigError(
            f'outer.algorithm={config.algorithm!r}: outer.merge = "eager" needs an outer step that is SGD '
            "(`outer_sgd`), so that what counted at once can be taken out again; set outer.merge = "
            '"overwrite" or "mix"'
        )
    settings = _settings(config, getattr(algorithm, "Settings", Section))
    return CustomAlgorithm(algorithm, settings, file.digest, tuple(algorithm.sections), is_every_step)


def _require_single_steps(config: CustomConfig) -> None:
    """Raises ConfigError where samples would be dealt out for other rounds than those of one inner step."""
    waits = config.straggler_deadline_s, config.straggler_grace
    schedule = config.inner_steps, config.inner_seconds, config.fragments, config.overlap
    if schedule != (1, None, 1, 0) or waits != (None, None):
        raise ConfigError(
            f"outer.algorithm={config.algorithm!r} is an EveryStep, whose rounds are one inner step; set "
            "outer.inner_steps = 1, and neither outer.inner_seconds, outer.straggler_deadline_s, "
            "outer.straggler_grace, outer.fragments nor outer.overlap"
        )
    if config.robust is not None:
        raise ConfigError(f"outer.algorithm={config.algorithm!r} is an EveryStep; outer.robust is for many inner steps")


def require_robust(config: CustomConfig, algorithm: OuterAlgorithm) -> None:
    """Raise ConfigError where contributions are to be combined robustly, and the algorithm has its own way."""
    if config.robust is not None and not getattr(getattr(algorithm, "exchange", None), "is_robust", False):
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
