"""The table of methods, and what users write behind a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from zeroband.config import load_config
from zeroband.config.outer import Outer
from zeroband.config.stability import cautions_of, method_of
from zeroband.errors import ConfigError
from zeroband.tools.compare.methods import (
    NO_STORE,
    PRESETS,
    Arm,
    flags_of,
    parse_arms,
    require_known,
)

FED_ADAM = Path(__file__).resolve().parents[4] / "examples" / "fed_adam.py"


def outer_of(text: str, *, nodes: int = 2) -> dict[str, Any]:
    (arm,) = parse_arms([text])
    section = next(flag for flag in flags_of(arm, nodes=nodes, inner_steps=20) if flag.startswith("--outer="))
    return json.loads(section.partition("=")[2])


def test_every_entry_is_one_that_the_rules_of_stability_know() -> None:
    sections = {name: preset.outer for name, preset in PRESETS.items() if name not in ("single", "custom")}
    methods_of = {name: method_of(TypeAdapter[Outer](Outer).validate_python(outer)) for name, outer in sections.items()}
    assert None not in methods_of.values()
    named = ("ddp", "diloco", "streaming", "eager", "delayed", "demo", "sparseloco")
    assert {name: methods_of[name] for name in named} == {name: name for name in named}


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "custom"])
def test_known_entry_loads_and_is_stable(preset: str) -> None:
    arm = Arm(preset, preset)
    config = load_config(flags_of(arm, nodes=4, inner_steps=20), {} if arm.is_alone else NO_STORE)
    assert not [caution for caution in cautions_of(config) if caution.is_unstable]


def test_outer_learning_rate_is_the_safe_one_for_the_number_of_nodes() -> None:
    lrs = [outer_of(name, nodes=nodes)["optimizer"]["lr"] for nodes in (2, 8) for name in ("diloco", "eager")]
    assert lrs == [0.7, 0.38, 0.7, 0.16]


def test_settings_behind_a_name_win_over_the_entry() -> None:
    assert outer_of("demo:k=8:values=float32")["k"] == 8
    assert outer_of("demo:k=8:values=float32")["values"] == "float32"
    diloco = outer_of("diloco:inner-steps=50:optimizer.lr=0.4")
    assert (diloco["inner_steps"], diloco["optimizer"]) == (50, {"lr": 0.4, "momentum": 0.9})
    (arm,) = parse_arms(["diloco:comm.codec=fp16:train.batch_size=3"])
    assert {"--comm.codec=fp16", "--train.batch_size=3"} < set(flags_of(arm, nodes=2, inner_steps=20))


def test_setting_with_several_values_is_a_family_of_methods() -> None:
    arms = parse_arms(["ddp", "diloco:nodes=8:optimizer.lr=0.4|0.8:optimizer.momentum=0.5"])
    family = "diloco:nodes=8:optimizer.lr=*:optimizer.momentum=0.5"
    assert [(arm.name, arm.family, arm.nodes) for arm in arms] == [
        ("ddp", "", None),
        ("diloco:nodes=8:optimizer.lr=0.4:optimizer.momentum=0.5", family, 8),
        ("diloco:nodes=8:optimizer.lr=0.8:optimizer.momentum=0.5", family, 8),
    ]
    assert outer_of(arms[2].name)["optimizer"] == {"lr": 0.8, "momentum": 0.5}


@pytest.mark.parametrize("text", ["ddp-muon", "muloco", "muloco:comm.codec=fp32", "ddp:optim.muon={}"])
def test_inner_optimizer_is_part_of_a_method(text: str) -> None:
    (arm,) = parse_arms([text])
    muon = load_config(flags_of(arm, nodes=4, inner_steps=20), NO_STORE).optim.muon
    assert muon is not None and muon.lr is None, "the rates that are tried are those of both"
    (rate,) = parse_arms([f"{text}:optim.muon.momentum=0.9"])
    muon = load_config(flags_of(rate, nodes=4, inner_steps=20), NO_STORE).optim.muon
    assert muon is not None and muon.momentum == 0.9


def test_one_entry_leaves_nothing_behind_in_the_table() -> None:
    before = json.dumps({name: dict(preset.outer or {}) for name, preset in PRESETS.items()})
    outer_of("average:optimizer.lr=0.5")
    assert json.dumps({name: dict(preset.outer or {}) for name, preset in PRESETS.items()}) == before


@pytest.mark.parametrize(
    ("texts", "complaint"),
    [
        (["ddp", "dloco"], "there is no method 'dloco'; this version knows single, ddp"),
        (["ddp", "ddp"], "give one or more distinct methods"),
        ([""], "give one or more distinct methods"),
        (["diloco:50"], "'50' in 'diloco:50' is not KEY=VALUE"),
        (["single:k=1"], "a single node has no settings"),
    ],
)
def test_methods_that_cannot_be_are_refused(texts: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_arms(texts)


def test_every_entry_but_the_one_without_its_file_is_known() -> None:
    require_known(parse_arms([name for name in PRESETS if name != "custom"]))
    with pytest.raises(ConfigError, match=r"'demo:x=1' is not in this version \(.*it knows single, ddp"):
        require_known(parse_arms(["ddp", "demo:x=1"]))


def test_algorithm_from_a_file_is_a_method() -> None:
    arms = parse_arms([f'custom:algorithm={FED_ADAM}:settings=["lr=0.01"]'])
    require_known(arms)
    outer = outer_of(arms[0].name)
    assert (outer["algorithm"], outer["settings"], outer["inner_steps"]) == (str(FED_ADAM), ["lr=0.01"], 20)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("custom", r"outer\.algorithm"),
        ("custom:algorithm=absent.py", r"'absent\.py' cannot be read"),
        (f'custom:algorithm={FED_ADAM}:settings=["rate=1"]', r"rate: Extra inputs"),
    ],
)
def test_algorithm_that_cannot_be_had_is_refused_before_anything_starts(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"{message}.*and custom:algorithm=FILE"):
        require_known(parse_arms([text]))
