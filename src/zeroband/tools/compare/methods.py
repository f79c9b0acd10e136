"""The table of methods: names for settings of [outer] and the codec. Pure."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from zeroband.config.load import load_config
from zeroband.config.outer import CustomConfig, DilocoConfig
from zeroband.config.schema import RunConfig
from zeroband.config.section import key_value
from zeroband.config.stability import method_of, safe_lr
from zeroband.errors import ConfigError

NO_STORE = {"ZERO_BAND_STORE__URL": "redis://localhost"}
"""Environment for validating a configuration without a store."""

_MOMENTUM = 0.9


@dataclass(frozen=True)
class Preset:
    """A named method."""

    what: str
    """Description for the report."""
    outer: Mapping[str, Any] | None
    """The [outer] section; None: a single node with the batch of one."""
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    """Other settings, by dotted key."""


_INT8, _FP32, _MUON = {"comm.codec": "int8"}, {"comm.codec": "fp32"}, {"optim.muon": "{}"}


def _diloco(what: str, flags: Mapping[str, str] = _INT8, **outer: Any) -> Preset:
    return Preset(what, {"type": "diloco", **outer}, flags)


PRESETS: Mapping[str, Preset] = {
    "single": Preset("a single node", None),
    "ddp": Preset("data parallel: gradients averaged in float32 at every step", {"type": "ddp"}, _FP32),
    "ddp-bf16": Preset("the same in bfloat16", {"type": "ddp"}, {"comm.codec": "bf16"}),
    "ddp-int8": Preset("the same in int8", {"type": "ddp"}, _INT8),
    "diloco": _diloco("DiLoCo, int8 pseudo-gradients"),
    "diloco-fp32": _diloco("DiLoCo, float32 pseudo-gradients", _FP32),
    "ddp-muon": Preset("data parallel in float32, with Muon for the matrices", {"type": "ddp"}, _FP32 | _MUON),
    "muloco": _diloco("MuLoCo: DiLoCo with Muon for the matrices, int8 pseudo-gradients", _INT8 | _MUON),
    "average": _diloco("plain mean of the parameters", _FP32, optimizer={"lr": 1.0, "momentum": 0.0}),
    "streaming": _diloco(
        "Streaming DiLoCo: 2 fragments, overlap of one step, mixing 0.5, int4",
        {"comm.codec": "int4"},
        fragments=2,
        overlap=1,
        merge="mix",
        alpha=0.5,
    ),
    "eager": _diloco("eager updates: the transfer overlaps the whole next round", overlap="full", merge="eager"),
    "delayed": _diloco("naively delayed updates, a baseline of eager ones", overlap="full", merge="overwrite"),
    "demo": Preset(
        "DeMo / DisTrO: 4 of 4096 coefficients as signs, at every step",
        {"type": "demo", "k": 4, "chunk": 64, "values": "sign", "decay": 0.999},
    ),
    "sparseloco": Preset(
        "SparseLoCo: 64 of 4096 values as two bits, error feedback, each value averaged over its senders",
        {"type": "sparseloco", "k": 64, "chunk": 64, "decay": 0.95, "lr": 1.0},
    ),
    "custom": Preset("an algorithm from a file", {"type": "custom"}),
}

_EVERY_STEP = ("ddp", "demo")
"""Algorithms whose rounds are one inner step."""


@dataclass(frozen=True)
class Arm:
    """A method with settings: a row of the table."""

    name: str
    """As given by the user: `demo`, `demo:k=8`."""
    preset: str
    settings: tuple[tuple[str, Any], ...] = ()
    """Overrides of the preset, by dotted key; in [outer] unless a section is named."""
    nodes: int | None = None
    """Nodes of its runs. None: those of the comparison."""
    family: str = ""
    """Pattern of the names of its alternatives, `diloco:optimizer.lr=*`, of which the best counts. Empty: none."""

    @property
    def is_alone(self) -> bool:
        return PRESETS[self.preset].outer is None


def parse_arms(texts: Sequence[str]) -> tuple[Arm, ...]:
    """Parse `ddp`, `demo:k=8`, `diloco:nodes=8:comm.codec=fp32`, `diloco:optimizer.lr=0.4|0.8`. Raises ConfigError."""
    arms = tuple(arm for text in texts if text.strip() for arm in _alternatives(text.strip()))
    names = [arm.name for arm in arms]
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"--methods={','.join(texts)}: give one or more distinct methods of {', '.join(PRESETS)}")
    return arms


def _alternatives(text: str) -> Iterator[Arm]:
    """One arm for each value of the setting that has several, `KEY=A|B|C`."""
    several = next((part for part in text.split(":") if "|" in part), None)
    if several is None:
        yield _parse_arm(text)
        return
    key, _, values = several.partition("=")
    for value in values.split("|"):
        arm = _parse_arm(text.replace(several, f"{key}={value}"))
        yield replace(arm, family=text.replace(several, f"{key}=*"))


def _parse_arm(text: str) -> Arm:
    preset, *settings = text.split(":")
    if preset not in PRESETS:
        raise ConfigError(f"--methods: there is no method {preset!r}; this version knows {_known()}")
    if settings and PRESETS[preset].outer is None:
        raise ConfigError(f"--methods: {text!r}: a single node has no settings")
    chosen = dict(_parse_setting(part, text) for part in settings)
    nodes = chosen.pop("outer.nodes", None)
    if nodes is not None and (not isinstance(nodes, int) or nodes < 1):
        raise ConfigError(f"--methods: {text!r}: nodes is a number from 1 on")
    return Arm(text, preset, tuple(chosen.items()), nodes)


def _parse_setting(part: str, text: str) -> tuple[str, Any]:
    try:
        key, value = key_value(part)
    except ValueError as error:
        raise ConfigError(f"--methods: {part!r} in {text!r} is not KEY=VALUE") from error
    is_named = key.split(".")[0] in RunConfig.model_fields
    return (key if is_named else f"outer.{key}").replace("-", "_"), value


def flags_of(arm: Arm, *, nodes: int, inner_steps: int) -> list[str]:
    """Return the flags of a run with this method."""
    preset = PRESETS[arm.preset]
    if preset.outer is None:
        return []
    outer = copy.deepcopy(dict(preset.outer))
    if outer["type"] not in _EVERY_STEP:
        outer["inner_steps"] = inner_steps
    if outer["type"] == "diloco" and "optimizer" not in outer:
        method = method_of(DilocoConfig(**preset.outer))
        assert method is not None
        outer["optimizer"] = {"lr": safe_lr(method, nodes, _MOMENTUM), "momentum": _MOMENTUM}
    flags: dict[str, Any] = {**preset.flags}
    for key, value in arm.settings:
        section, _, name = key.partition(".")
        if section == "outer":
            _put(outer, name.split("."), value)
        else:
            flags[key] = value
    return [f"--outer={json.dumps(outer)}", *(f"--{key}={value}" for key, value in flags.items())]


def _put(table: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for name in path[:-1]:
        table = cast("dict[str, Any]", table.setdefault(name, {}))
    table[path[-1]] = value


def _known() -> str:
    return f"{', '.join(name for name in PRESETS if name != 'custom')}, and custom:algorithm=FILE"


def digest_of_algorithm(outer: CustomConfig) -> str:
    """Return the digest of a custom algorithm's file. Raises ConfigError without a file."""
    from zeroband.outer.custom import load_algorithm  # imported lazily: loads torch

    return load_algorithm(outer).digest


def require_known(arms: Sequence[Arm]) -> None:
    """Raise ConfigError for methods with settings that this version refuses."""
    for arm in arms:
        try:
            config = load_config(flags_of(arm, nodes=2, inner_steps=20), {} if arm.is_alone else NO_STORE)
            if isinstance(config.outer, CustomConfig):
                digest_of_algorithm(config.outer)
        except ConfigError as error:
            why = str(error).splitlines()[0]
            raise ConfigError(f"--methods: {arm.name!r} is not in this version ({why}); it knows {_known()}") from None
