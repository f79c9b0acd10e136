"""Checkpoints of runs with a token, saved by a real writer, against somebody who can write to their folder."""

from __future__ import annotations

import hashlib
import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import xxhash

from zeroband.checkpoint.loading import open_checkpoint
from zeroband.checkpoint.manifest import parse_manifest
from zeroband.checkpoint.storage import open_storage
from zeroband.config import load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.errors import RecoveryFailed
from zeroband.node.mesh import init_local_mesh
from zeroband.observe.events import EVENTS_FILE
from zeroband.runtime.loop import train
from zeroband.tools.offline import sample

pytestmark = pytest.mark.slow

TOKEN = "open sesame"
VARIABLE = "ZERO_BAND_RUN__TOKEN"
TINY = {
    "node.id": "solo",
    "run.id": "guarded",
    "model.d_model": 32,
    "model.n_layers": 1,
    "data.seq_length": 16,
    "data.source.type": "synthetic",
    "data.source.documents": 50,
    "train.batch_size": 4,
    "train.dtype": "float32",
    "ckpt.every_rounds": 2,
    "observe.log_every_steps": 1000,
}


def trained(folder: Path, *, steps: int, token: str | None = TOKEN, resumes: str = "") -> list[int]:
    """Train a node that is alone up to a step; the steps of the checkpoints that it went on from, over all starts."""
    settings = {**TINY, "run.dir": folder / "runs", "ckpt.path": folder / "ckpt", "data.cache_dir": folder / "cache"}
    settings["train.total_steps"] = steps
    argv = [f"--{key}={value}" for key, value in settings.items()]
    with ExitStack() as stack:
        local = init_local_mesh({})
        stack.callback(local.close)
        config = load_config([*argv, *([resumes] if resumes else [])], {VARIABLE: token} if token else {})
        train(config, local, Departure(1.0), stack)
    lines = (folder / "runs/guarded/solo" / EVENTS_FILE).read_text().splitlines()
    return [event["step"] for event in map(json.loads, lines) if event["kind"] == "resumed_from"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 2 and 4, made with a token."""
    trained(tmp_path, steps=4)
    return tmp_path


def forge(folder: Path, step: int, *, keeps_mac: bool) -> str:
    """Change a file of a checkpoint and all the hashes that anybody can compute; the manifest's path."""
    place = folder / f"ckpt/guarded/step_{step:08d}"
    changed = place / "outer/model.safetensors"
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    record = json.loads((place / "manifest.json").read_text())
    record["state"] = ""  # a lone node's checkpoint has no digest
    file = record["files"]["outer/model.safetensors"]
    file["hash"] = xxhash.xxh3_128_hexdigest(bytes(data))
    if "sha256" in file:
        file["sha256"] = hashlib.sha256(data).hexdigest()
    mac, _ = record.pop("mac", ""), record.pop("hash")
    compact = json.dumps(record, sort_keys=True, separators=(",", ":")).encode()
    record["hash"] = xxhash.xxh3_128_hexdigest(compact)
    if keeps_mac and mac:
        record["mac"] = mac
    text = json.dumps(record, indent=1, sort_keys=True).encode()
    parse_manifest(text)  # whoever has no token takes it
    (place / "manifest.json").write_bytes(text)
    open_checkpoint(open_storage(str(folder / "ckpt"), "guarded"), step).verify()
    return f"step_{step:08d}/manifest.json"


@pytest.mark.parametrize("keeps_mac", [True, False], ids=["old MAC", "no MAC"])
def test_forged_checkpoint_is_passed_over_and_named(
    folder: Path, keeps_mac: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = forge(folder, 4, keeps_mac=keeps_mac)
    assert trained(folder, steps=6, resumes="--resume") == [2]
    said = [str(getattr(record, "fields", "")) for record in caplog.records if "skipped" in record.message]
    assert any(path in text and "MAC" in text and "--resume.trust" in text for text in said), said


def test_run_whose_checkpoints_are_all_foreign_is_not_begun_unless_they_are_trusted(folder: Path) -> None:
    for token, why in (("another", "saved it with another token"), (TOKEN, "it carries no MAC")):
        if token == TOKEN:
            for step in (2, 4):
                forge(folder, step, keeps_mac=False)
        with pytest.raises(RecoveryFailed, match=rf"step_00000004/manifest.json: .*{why}.*--resume.trust"):
            trained(folder, steps=6, token=token, resumes="--resume")
    assert trained(folder, steps=6, resumes="--resume.trust") == [4]


def test_checkpoint_with_a_mac_is_opened_without_the_token_which_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def sampled() -> tuple[int, str]:
        code = sample.main([str(folder / "ckpt/guarded"), "--tokens", "1", "--device", "cpu"])
        return code, capsys.readouterr().err

    monkeypatch.delenv(VARIABLE, raising=False)
    code, said = sampled()
    assert code == 0 and "step 4 of run guarded" in said and "its MAC is not checked" in said
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert sampled() == (0, "")
    monkeypatch.setenv(VARIABLE, "another")
    code, said = sampled()
    assert code == 2 and "another token" in said and "without ZERO_BAND_RUN__TOKEN" in said


def test_runs_without_a_token_have_checkpoints_without_a_mac(tmp_path: Path) -> None:
    trained(tmp_path, steps=2, token=None)
    text = (tmp_path / "ckpt/guarded/step_00000002/manifest.json").read_text()
    assert "mac" not in json.loads(text) and "sha256" not in text
    assert trained(tmp_path, steps=4, token=None, resumes="--resume") == [2]
