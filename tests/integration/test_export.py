"""A run that exports at its end, and another that starts from what the first one wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.unit.export.llama import llama_logits

from zeroband.config import load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import ConfigError
from zeroband.node.mesh import init_local_mesh
from zeroband.runtime.loop import train
from zeroband.tools.cluster import RedisServer
from zeroband.tools.offline import evaluate, export

TINY = {
    "model.d_model": 16,
    "model.n_layers": 2,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.d_ff": 24,
    "data.seq_length": 16,
    "data.source": json.dumps({"type": "synthetic", "documents": 50}),
    "train.batch_size": 4,
    "train.micro_bs": 2,
    "train.dtype": "float32",
    "train.total_steps": 2,
    "node.id": "n0",
}

pytestmark = pytest.mark.slow


def run(folder: Path, run_id: str, environ: Mapping[str, str] | None = None, **flags: Any) -> Path:
    """Train two steps; the node's folder."""
    settings = TINY | {"run.dir": folder, "run.id": run_id, "data.cache_dir": folder / "cache"}
    settings |= {key.replace("__", "."): value for key, value in flags.items()}
    config = load_config([f"--{key}={value}" for key, value in settings.items()], environ or {})
    with ExitStack() as stack:
        local = init_local_mesh({})
        stack.callback(local.close)
        train(config, local, Departure(grace_s=1.0), stack)
    return folder / run_id / "n0"


def records(node: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (node / name).read_text().splitlines()]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Node folder of a run with an export and a checkpoint in `ck`."""
    folder = tmp_path_factory.mktemp("export")
    return run(folder, "first", export__dtype="float32", ckpt__path=folder / "ck")


def test_run_exports_at_its_end_and_says_so(exported: Path) -> None:
    event = next(event for event in records(exported, "events.jsonl") if event["kind"] == "model_exported")
    assert Path(event["path"]) == exported / "export"
    assert event["parity"].startswith(("equal to transformers", "not checked: transformers is not installed"))
    logits = llama_logits(exported / "export", torch.randint(257, (1, 16)))
    assert logits.shape == (1, 16, 320) and logits.isfinite().all()


def test_checkpoint_of_the_run_is_exported_to_the_same_weights(exported: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export.main([str(exported.parents[1] / "ck" / "first"), str(out), "--dtype=float32", "--no-parity"]) == 0
    assert (out / "model.safetensors").read_bytes() == (exported / "export" / "model.safetensors").read_bytes()
    assert (out / "config.json").read_text() == (exported / "export" / "config.json").read_text()


def test_checkpoint_of_the_run_is_evaluated_on_what_the_run_held_out(
    exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([str(exported.parents[1] / "ck" / "first"), "--device=cpu"]) == 0
    out = capsys.readouterr().out
    assert "step 2 of run first" in out
    assert re.search(r"^loss +5\.\d+ nats", out, flags=re.MULTILINE)  # log(320) = 5.8, two steps before


def test_run_starts_from_the_weights_of_an_export(exported: Path, tmp_path: Path) -> None:
    start = exported / "export"
    there = run(tmp_path, "second", train__init_from=start, train__total_steps=1, optim__warmup_steps=10**6,
                export__dtype="float32", export__path=tmp_path / "out")  # fmt: skip
    before, after = load_file(start / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert not (there / "export").exists()
    for name, value in before.items():  # one step at almost no learning rate
        torch.testing.assert_close(after[name], value, rtol=0, atol=1e-6)


def test_run_refuses_to_start_from_another_model(exported: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds another model: model\.d_ff is 24 there and 32 here; set them equal"):
        run(tmp_path, "third", train__init_from=exported / "export", model__d_ff=32)


def test_run_leaves_a_folder_that_is_there_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    node = run(tmp_path, "fourth", export__path=tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]
    assert [event["kind"] for event in records(node, "events.jsonl")][-2:] == ["run_finished", "left"]


def test_node_that_started_from_other_weights_is_refused_at_join(
    exported: Path, redis_server: RedisServer, tmp_path: Path
) -> None:
    environ = {"ZERO_BAND_STORE__URL": redis_server.url}
    run(tmp_path, "fifth", environ, outer__type="ddp")
    with pytest.raises(ConfigError, match=r"refused at join: train\.init_from \(weights\) is '' in the running run"):
        run(tmp_path, "fifth", environ, outer__type="ddp", train__init_from=exported / "export")
