"""Checkpoints as the library saves them, opened for export, evaluation and sampling."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tests.unit.export.trained import CORPUS, TINY, save, trained_of

from zeroband.checkpoint.storage import open_storage
from zeroband.errors import CheckpointDamaged, ConfigError, RecoveryFailed
from zeroband.export.directory import TrainedModel, write_directory
from zeroband.export.opened import open_trained
from zeroband.model.blueprint import LlamaBlueprint


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints of steps 10 and 20, which differ."""
    storage = open_storage(str(tmp_path / "ck"), "demo", "a")
    for step in (10, 20):
        save(storage, step, trained_of(TINY, seed=step))
    return tmp_path / "ck" / "demo"


def is_of_seed(model: TrainedModel, seed: int) -> bool:
    expected = trained_of(TINY, seed=seed)
    names = [name for name, _ in model.blueprint.on_meta().named_parameters()]
    return all(torch.equal(model.read(name), expected.read(name)) for name in names)


def test_root_of_a_run_is_its_latest_checkpoint(run: Path) -> None:
    opened = open_trained(str(run))
    assert opened.what == "step 20 of run demo"
    assert opened.model.blueprint.to_record() == LlamaBlueprint(TINY, 320).to_record()
    assert opened.model.seq_length == 32
    assert opened.corpus == CORPUS
    assert is_of_seed(opened.model, 20)


def test_folder_of_a_step_is_that_checkpoint(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_of_seed(open_trained(f"{run}/step_00000010/").model, 10)
    monkeypatch.chdir(run)
    assert is_of_seed(open_trained("step_00000010").model, 10)


def test_url_is_opened_like_a_folder() -> None:
    save(open_storage("memory://opened/ck", "demo", "a"), 10, trained_of(TINY, seed=10))
    assert is_of_seed(open_trained("memory://opened/ck/demo").model, 10)
    assert is_of_seed(open_trained("memory://opened/ck/demo/step_00000010").model, 10)


def test_damaged_checkpoint_is_passed_over_for_an_older_one(run: Path) -> None:
    flip(next((run / "step_00000020" / "outer").glob("model-*.safetensors")))
    assert open_trained(str(run)).what == "step 10 of run demo"


def test_damaged_checkpoint_that_was_asked_for_is_an_error_naming_the_file(run: Path) -> None:
    damaged = next((run / "step_00000020" / "outer").glob("model-*.safetensors"))
    flip(damaged)
    with pytest.raises(CheckpointDamaged, match=damaged.name):
        open_trained(str(run / "step_00000020"))
    shutil.rmtree(run / "step_00000010")
    with pytest.raises(RecoveryFailed, match=rf"no checkpoint in .*demo verifies: .*{damaged.name}"):
        open_trained(str(run))


def test_momentum_is_not_read(run: Path) -> None:
    flip(next((run / "step_00000020" / "outer").glob("momentum-*.safetensors")))
    assert is_of_seed(open_trained(str(run / "step_00000020")).model, 20)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


OTHER_IDS = CORPUS.to_record() | {"tokenizer_fingerprint": "byte/0"}
OTHER_VERSION = r"step_00000010/manifest\.json: another version's \[model\] or \[data\]"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"data": OTHER_IDS}, r"data\.tokenizer='byte' does not give the ids of when step 10 of run demo was saved"),
        ({"data": {}}, OTHER_VERSION),
        ({"data": {**OTHER_IDS, "colour": "red"}}, rf"(?s){OTHER_VERSION}.*colour"),
        ({"model": {"d_model": 16, "vocab_size": 320, "n_experts": 8}}, rf"(?s){OTHER_VERSION}.*n_experts"),
    ],
)
def test_checkpoint_of_another_world_is_refused(changes: dict[str, object], complaint: str, tmp_path: Path) -> None:
    save(open_storage(str(tmp_path), "demo", "a"), 10, trained_of(TINY), **changes)
    with pytest.raises(ConfigError, match=complaint):
        open_trained(str(tmp_path / "demo"))


@pytest.mark.parametrize(("where", "complaint"), [("nothing", "is no folder"), (".", "no checkpoint in .*; its")])
def test_place_without_a_checkpoint_says_what_to_give(where: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=complaint):
        open_trained(str(tmp_path / where))


@pytest.mark.slow
def test_exported_directory_opens_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    write_directory(trained_of(TINY, seed=10), tmp_path / "out", "float32")
    opened = open_trained(str(tmp_path / "out"))
    assert opened.model.blueprint.to_record()["d_model"] == TINY.d_model
    assert (opened.model.seq_length, opened.corpus) == (32, None)
    assert is_of_seed(opened.model, 10)


def test_directory_with_a_broken_configuration_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 3}')
    with pytest.raises(ConfigError, match=r"config\.json: no key 'num_hidden_layers'"):
        open_trained(str(tmp_path))
