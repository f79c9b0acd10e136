"""Every preset trains: two rounds of one node, with the model and the data made tiny; all else stays as it is there."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from zeroband.config import RunConfig, load_config
from zeroband.config.model import parameter_count
from zeroband.config.outer import DilocoConfig
from zeroband.data.tokenizer import tokenizer_of
from zeroband.data.tokens import prepare
from zeroband.elastic.membership.departure import Departure
from zeroband.node.mesh import init_local_mesh
from zeroband.runtime.loop import train
from zeroband.tools.cluster import RedisServer

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PRESETS = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.toml"))
SEQUENCES, LENGTH, STEPS = 4, 16, 2

TINY = {
    "model.d_model": 192,  # the heads stay as they are, and both 6 and 32 of them divide it
    "model.n_layers": 2,
    "model.d_ff": 32,
    "data.tokenizer": "byte",
    "data.vocab_size": "none",
    "data.seq_length": LENGTH,
    "data.source": json.dumps({"type": "synthetic", "documents": 50}),
    "train.batch_size": SEQUENCES,
    "train.micro_bs": 2,
    "train.total_steps": STEPS,
    "train.compile": False,
    "elastic.min_nodes": 1,
    "elastic.start_nodes": 1,
    "observe.sample_tokens": 2,
}

NOMINAL = {
    "14M.toml": ((384, 8, 6, 6, 1024), 320, 14e6),
    "150M.toml": ((1024, 12, 16, 16, 2688), 0, 150e6),
    "1B.toml": ((2048, 22, 32, 4, 5632), 32_000, 1.1e9),
    "10B.toml": ((4096, 42, 32, 8, 14336), 128_256, 10e9),
}
"""Preset -> its published shape, the vocabulary that its name counts (the 150 M leave it out), that many parameters."""


@dataclass(frozen=True)
class Trained:
    """What a preset left behind."""

    config: RunConfig
    environ: Mapping[str, str]
    folder: Path

    def records(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture(scope="module", params=PRESETS)
def trained(
    request: pytest.FixtureRequest, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    preset = CONFIGS / request.param
    folder = tmp_path_factory.mktemp("preset")
    asked = tomllib.loads(preset.read_text())
    is_foreign = "type" in asked.get("model", {})
    flags = [f"--{key}={value}" for key, value in TINY.items() if not (is_foreign and key.startswith("model."))]
    if file := asked.get("model", {}).get("file"):  # from the root of the clone
        flags.append(f"--model.file={CONFIGS.parent / file}")
    run_id = f"{folder.name}-{os.getpid()}"  # pytest's workers have folders of equal names, and one shared memory
    flags += [f"--run.dir={folder}", f"--run.id={run_id}", "--node.id=n0", f"--data.cache_dir={folder / 'cache'}"]
    outer = asked.get("outer")
    if outer and outer["type"] == "diloco":
        flags.append(f"--outer.inner_steps={outer.get('fragments', 1)}")
        flags += ["--outer.overlap=1"] if outer.get("overlap") else []
    if outer and outer["type"] in ("sparseloco", "custom"):
        flags.append("--outer.inner_steps=1")
    if outer and outer["type"] == "custom":  # from the root of the clone
        flags.append(f"--outer.algorithm={CONFIGS.parent / outer['algorithm']}")
    environ = {"ZERO_BAND_STORE__URL": redis_server.url} if outer else {}
    config = load_config([f"@{preset}", *flags], environ)
    with ExitStack() as stack:
        local = init_local_mesh({})
        stack.callback(local.close)
        train(config, local, Departure(grace_s=1.0), stack)
    return Trained(config, environ, folder / run_id / "n0")


@pytest.mark.slow
def test_preset_trains_two_steps_at_a_tiny_size(trained: Trained) -> None:
    records = trained.records("metrics.jsonl")
    assert [record["step"] for record in records] == [1, 2]
    for record in records:
        assert record["train/loss"] == pytest.approx(math.log(320), abs=0.5)  # of a model that knows nothing yet
    assert records[-1]["train/tokens"] == STEPS * SEQUENCES * LENGTH
    assert trained.records("events.jsonl")[-2]["kind"] == "run_finished"


@pytest.mark.slow
def test_preset_commits_a_round_for_each_step_where_it_has_an_outer_algorithm(trained: Trained) -> None:
    rounds = [record.get("outer/round") for record in trained.records("metrics.jsonl")]
    outer = trained.config.outer
    if isinstance(outer, DilocoConfig) and outer.overlap:  # they travel beside training, and the last step waits
        assert rounds == [None, STEPS + outer.fragments - 1]
    else:
        assert rounds == ([None, None] if outer is None else [1, 2])


@pytest.mark.slow
def test_resolved_configuration_in_the_node_folder_loads_back(trained: Trained) -> None:
    assert load_config([f"@{trained.folder / 'config.toml'}"], trained.environ) == trained.config


@pytest.mark.parametrize("preset", NOMINAL)
def test_preset_has_the_shape_and_the_size_of_its_name(preset: str) -> None:
    shape, vocab_size, parameters = NOMINAL[preset]
    config = load_config([f"@{CONFIGS / preset}"], {"ZERO_BAND_STORE__URL": "redis://localhost"})
    model = config.model
    assert (model.d_model, model.n_layers, model.n_heads, model.kv_heads, model.ff_width) == shape
    assert parameter_count(model, vocab_size) == pytest.approx(parameters, rel=0.05)


@pytest.mark.parametrize(("preset", "vocab_size"), [("150M", 32_000), ("1B", 32_000), ("10B", 128_256)])
def test_one_flag_beside_a_preset_takes_made_up_tokens_of_its_vocabulary(preset: str, vocab_size: int) -> None:
    flags = [f"@{preset}", "--outer", "none", "--data.source.type", "synthetic-tokens", "--data.source.tokens", "9000"]
    data = load_config(flags, {}).data
    assert tokenizer_of(data).padded_vocab_size == vocab_size
    assert prepare(data, seed=0).end_of_document == vocab_size - 1


def test_150m_is_the_recipe_of_opendiloco() -> None:
    config = load_config([f"@{CONFIGS / '150M.toml'}"], {"ZERO_BAND_STORE__URL": "redis://localhost"})
    outer, adamw = config.outer, config.optim.adamw
    assert isinstance(outer, DilocoConfig)
    assert (outer.inner_steps, outer.optimizer.lr, outer.optimizer.momentum) == (500, 0.7, 0.9)
    assert outer.optimizer.nesterov
    assert (adamw.lr, adamw.betas, adamw.weight_decay) == (4e-4, (0.9, 0.95), 0.1)
    assert (config.optim.warmup_steps, config.optim.schedule.type, config.optim.clip_norm) == (1000, "cosine", 1.0)
    assert (config.train.batch_size, config.train.total_steps, config.data.seq_length) == (512, 88_000, 1024)
