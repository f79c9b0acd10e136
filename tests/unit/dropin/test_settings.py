"""What a run is configured by that has no configuration file, and its outer optimizer in torch's words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from zeroband.config.outer import DilocoConfig, OuterSGDConfig
from zeroband.config.schema import RunConfig
from zeroband.dropin.settings import ENDLESS_STEPS, config_of, outer_step_of, shared_of
from zeroband.errors import ConfigError
from zeroband.outer.torch_optimizer import TorchOuterOptimizer

URL = "redis://localhost:6379"


def config(
    settings: Mapping[str, object] = {}, environ: Mapping[str, str] = {}, total_steps: int | None = None
) -> RunConfig:
    outer = OuterSGDConfig(lr=0.4, momentum=0.5, nesterov=False)
    return config_of(settings, environ, store_url=URL, inner_steps=7, outer=outer, total_steps=total_steps)


def test_arguments_become_the_runs_configuration() -> None:
    made = config({"run.id": "first", "fault.detect_s": 2.5, "comm.encryption": False, "outer.fragments": 7})
    assert isinstance(made.outer, DilocoConfig)
    assert (made.outer.inner_steps, made.outer.fragments) == (7, 7)
    assert made.outer.optimizer == OuterSGDConfig(lr=0.4, momentum=0.5, nesterov=False)
    assert (made.run.id, made.fault.detect_s, made.comm.encryption) == ("first", 2.5, False)
    assert (made.train.total_steps, made.train.batch_size) == (ENDLESS_STEPS, 1)
    assert config(total_steps=9).train.total_steps == 9


def test_settings_win_over_the_environment_and_both_over_the_names_made_here() -> None:
    environ = {"ZERO_BAND_NODE__ID": "box", "ZERO_BAND_RUN__ID": "theirs"}
    assert (config({}, environ).node.id, config({}, environ).run.id) == ("box", "theirs")
    assert config({"node.id": "mine"}, environ).node.id == "mine"


def test_processes_of_one_machine_are_nodes_of_their_own_and_ranks_of_one_launcher_are_one() -> None:
    alone, rank = config().node.id, config(environ={"TORCHELASTIC_RUN_ID": "x"}).node.id
    assert alone is not None and alone.endswith(f"-{os.getpid()}")
    assert rank is not None and rank.endswith(f"-{os.getppid()}")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("model.d_model", r"\[model\] configures the trainer"),
        ("data.seq_length", r"\[data\] configures the trainer"),
        ("outer.inner_steps", "give inner_steps to DiLoCoOptimizer"),
        ("outer.optimizer.lr", "give outer_optimizer to DiLoCoOptimizer"),
        ("store.url", "give store to DiLoCoOptimizer"),
        ("falt.detect_s", "did you mean fault.detect_s"),
    ],
)
def test_keys_of_others_are_refused(key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config({key: 1})


def test_nodes_share_what_all_depend_on_and_nothing_of_the_trainers() -> None:
    shared = shared_of(config(), {"parameter w": "(2,)"}, None)
    assert shared["parameter w"] == "(2,)"
    assert shared["outer.optimizer.lr"] == "0.4"
    assert shared["total_steps"] == "None"
    assert "outer.inner_steps" not in shared
    assert not [key for key in shared if key.startswith(("train.", "model.", "data.", "optim."))]
    assert shared == shared_of(config({"node.id": "another"}), {"parameter w": "(2,)"}, None)


def test_peers_name_their_run_themselves() -> None:
    with pytest.raises(ConfigError, match=r"run\.id='auto' is for the trainer; .* the run\.id of its peers"):
        config({"run.id": "auto"})


# -- the outer optimizer ----------------------------------------------------------------------------------------------


def params(count: int = 1) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(2)) for _ in range(count)]


def test_default_is_the_one_of_diloco() -> None:
    made = config_of({}, {}, store_url=URL, inner_steps=None, outer=None, total_steps=None).outer
    assert isinstance(made, DilocoConfig)
    assert made.optimizer == OuterSGDConfig(lr=0.7, momentum=0.9, nesterov=True)


def test_settings_of_torchs_sgd_are_taken_over() -> None:
    partially = partial(torch.optim.SGD, lr=0.3, momentum=0.8, nesterov=True)
    assert outer_step_of(partially) == OuterSGDConfig(lr=0.3, momentum=0.8, nesterov=True)
    ready = torch.optim.SGD(params(), lr=1.0)
    assert outer_step_of(ready) == OuterSGDConfig(lr=1.0, momentum=0.0, nesterov=False)


@pytest.mark.parametrize(
    "asked",
    [torch.optim.Adam, *(partial(torch.optim.SGD, lr=0.7, **option) for option in ({"weight_decay": 0.5},))],
)
def test_other_optimizers_step_as_they_are(asked: Any) -> None:
    assert isinstance(outer_step_of(asked), TorchOuterOptimizer)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (torch.optim.Adam(params()), "instance of Adam, and the outer parameters are the run's"),
        (torch.optim.Muon, "does not take parameters that are vectors"),
        (partial(torch.optim.SGD, lr=0.7, momentum=1.5), "momentum=1.5"),
        (partial(torch.optim.SGD, lr=0.0), "lr=0"),
        (
            torch.optim.SGD([{"params": params()}, {"params": params(), "lr": 0.1}], lr=0.7),
            "groups with different settings",
        ),
    ],
)
def test_what_the_outer_step_cannot_be_is_refused_by_name(asked: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        outer_step_of(asked)
