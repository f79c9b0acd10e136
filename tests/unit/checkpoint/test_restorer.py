"""Where a run goes on from: its own checkpoints or another's, and what is refused."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.unit.checkpoint.saves import SECTIONS, buffers_of, layout, saved, stamp_of

from zeroband.checkpoint.layout import MANIFEST
from zeroband.checkpoint.loading import steps_in_order
from zeroband.checkpoint.own_state import views_of
from zeroband.checkpoint.restorer import Restorer, source_of
from zeroband.checkpoint.storage import LocalStorage
from zeroband.config.data import DataConfig
from zeroband.data.tokens import Corpus
from zeroband.elastic.membership.resume_rules import Held, Holding
from zeroband.errors import ConfigError, RecoveryFailed
from zeroband.node.faults import FaultPoints

Buffers = dict[str, torch.Tensor]


def storage(folder: Path, run_id: str) -> LocalStorage:
    return LocalStorage(folder / run_id, "a")


def restorer(
    folder: Path,
    *,
    other: str | None = None,
    step: int | None = None,
    on_piece: Callable[[], object] = lambda: None,
) -> tuple[Restorer, Buffers]:
    buffers = {name: torch.zeros(layout().numel) for name in SECTIONS}
    source = source_of(str(folder), "run", "a", other=other, step=step)
    return Restorer(source, "a", layout(), FaultPoints(()), on_piece), buffers


def holds(buffers: Buffers, step: int) -> bool:
    return all(torch.equal(buffers[name], expected) for name, expected in buffers_of(step).items())


def test_newest_is_what_the_newest_checkpoint_of_this_run_says_of_itself(tmp_path: Path) -> None:
    saved(storage(tmp_path, "run"), 10, 20)
    restore, buffers = restorer(tmp_path)
    assert restore.newest() == stamp_of(20)
    assert not any(buffer.any() for buffer in buffers.values())
    restore.point_latest(10)  # the run went back to it
    assert restore.newest() == stamp_of(10) and steps_in_order(storage(tmp_path, "run")) == [10, 20]


def test_there_is_no_newest_in_a_run_without_checkpoints_of_its_own(tmp_path: Path) -> None:
    saved(storage(tmp_path, "other"), 10)
    assert restorer(tmp_path, other=f"{tmp_path}/other")[0].newest() is None


def held_step(restore: Restorer, step: int | None = None) -> int | None:
    held = restore.holding(step).held
    return None if held is None else held.step


def test_holding_names_the_newest_checkpoint_and_reads_nothing(tmp_path: Path) -> None:
    saved(storage(tmp_path, "run"), 10, 20)
    restore, buffers = restorer(tmp_path)
    assert restore.holding() == Holding(held=Held(20, 2, stamp_of(20).state_digest, ""))
    assert (held_step(restore, 10), held_step(restore, 15)) == (10, None)
    assert "there are steps [10, 20]" in restore.holding(15).problem
    assert not any(buffer.any() for buffer in buffers.values())
    assert restorer(tmp_path / "empty")[0].holding() == Holding()


def test_holding_passes_over_what_is_not_whole_and_what_was_rejected(tmp_path: Path) -> None:
    saved(storage(tmp_path, "run"), 10, 20)
    (tmp_path / "run/step_00000020" / MANIFEST).unlink()
    restore, _ = restorer(tmp_path)
    assert held_step(restore) == 10 and [*restore.skipped_steps] == [20]
    found = restore.holding(rejected={10: "its hash is another one"})
    assert found.held is None and sorted(restore.skipped_steps) == [10, 20]
    assert (
        "its hash is another one; step_00000020/manifest.json is missing: the save never finished in" in found.problem
    )


def test_holding_is_of_the_other_run_until_this_one_has_its_own_or_a_step_is_named(tmp_path: Path) -> None:
    saved(storage(tmp_path, "other"), 40)
    first, _ = restorer(tmp_path, other=f"{tmp_path}/other")
    found = first.holding().held
    assert found is not None and (found.step, found.is_own) == (40, False)
    saved(storage(tmp_path, "run"), 10)
    own = restorer(tmp_path, other=f"{tmp_path}/other")[0].holding()
    assert own.held is not None and (own.held.step, own.held.is_own, own.ordered) == (10, True, None)
    named = restorer(tmp_path, other=f"{tmp_path}/other", step=40)[0].holding()
    assert named.held is not None and (named.held.is_own, named.ordered) == (False, 40)
    assert "there is no checkpoint in" in restorer(tmp_path / "new", other=f"{tmp_path}/none")[0].holding().problem


def test_holding_of_a_folder_that_cannot_be_read_is_a_problem_and_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: object) -> None:
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(LocalStorage, "names", fails)
    assert "the network mount is stale" in restorer(tmp_path)[0].holding().problem


@pytest.mark.parametrize("harm", [Path.unlink, lambda manifest: manifest.write_text("{")], ids=["missing", "damaged"])
def test_newest_that_cannot_be_read_is_none_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Callable[[Path], object]
) -> None:
    saved(storage(tmp_path, "run"), 10, 20)
    harm(tmp_path / "run/step_00000020" / MANIFEST)
    restore, _ = restorer(tmp_path)
    assert restore.newest() is None
    assert [record.message for record in caplog.records] == ["no usable checkpoint to join from"]


@pytest.mark.parametrize(
    ("own", "other", "step", "taken"),
    [
        ((10, 20), None, None, 20),
        ((10, 20), None, 10, 10),
        ((), "other", None, 40),
        ((), "other/", None, 40),
        ((), "other/step_00000040", None, 40),
        ((30,), "other", None, 30),  # it was preempted, and goes on by the same command
        ((30,), "other/step_00000040", None, 40),
    ],
)
def test_run_goes_on_from_its_newest_unless_another_run_or_a_step_is_named(
    tmp_path: Path, own: tuple[int, ...], other: str | None, step: int | None, taken: int
) -> None:
    saved(storage(tmp_path, "other"), 40)
    saved(storage(tmp_path, "run"), *own)
    restore, buffers = restorer(tmp_path, other=other and f"{tmp_path}/{other}", step=step)
    state = restore.restore(buffers)
    assert state is not None and (state.step, state.round) == (taken, taken // 10) and holds(buffers, taken)
    if step is not None:
        assert restore.restore(buffers, 20) is not None and holds(buffers, 20)  # what the others agreed on


def test_other_samples_than_the_checkpoint_counts_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    corpus = Corpus(DataConfig(seq_length=8), 0, fingerprint="f", tokenizer_fingerprint="t")
    saved(storage(tmp_path, "run"), 10, data=corpus.to_record())
    for ours, changed in ((corpus, None), (replace(corpus, data=DataConfig(seq_length=16)), "8 -> 16")):
        caplog.clear()
        source = source_of(str(tmp_path), "run", "a", other=None, step=None)
        buffers = {name: torch.zeros(layout().numel) for name in SECTIONS}
        Restorer(source, "a", layout(), FaultPoints(()), data=ours.to_record()).restore(buffers)
        said = [vars(record)["fields"] for record in caplog.records if "samples are others" in record.message]
        assert said == ([] if changed is None else [{"data.seq_length": changed}])


@pytest.mark.parametrize(
    ("other", "step", "said"),
    [
        (None, None, []),
        (None, 30, []),
        (None, 20, [{"step": 20, "newer": 1, "newest": 30}]),
        ("other/step_00000010", None, [{"step": 10, "newer": 2, "newest": 30}]),
    ],
)
def test_newer_checkpoints_that_a_named_step_leaves_behind_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: str | None, step: int | None, said: list[object]
) -> None:
    saved(storage(tmp_path, "other"), 10)
    saved(storage(tmp_path, "run"), 20, 30)
    restore, buffers = restorer(tmp_path, other=other and f"{tmp_path}/{other}", step=step)
    restored = restore.restore(buffers)
    assert (
        restored is not None and restore.restore(buffers, restored.step) is not None
    )  # as the others agreed: not said again
    assert [record.__dict__["fields"] for record in caplog.records] == said


def test_run_without_checkpoints_begins_anew(tmp_path: Path) -> None:
    assert restorer(tmp_path)[0].restore({}) is None


def test_other_run_without_checkpoints_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no checkpoint in"):
        restorer(tmp_path, other=f"{tmp_path}/other")[0].restore({})


def test_step_that_is_not_there_is_an_error_that_names_those_that_are(tmp_path: Path) -> None:
    saved(storage(tmp_path, "run"), 10, 20)
    with pytest.raises(RecoveryFailed, match=r"step_00000015.*there are steps \[10, 20\]"):
        restorer(tmp_path, step=15)[0].restore({})


def test_what_is_staged_changes_the_state_only_when_it_is_taken(tmp_path: Path) -> None:
    saved(storage(tmp_path, "run"), 10)
    restore, buffers = restorer(tmp_path)
    assert restore.stage(10, SECTIONS).step == 10
    assert not any(buffer.any() for buffer in buffers.values())
    assert all(torch.equal(restore.pop_staged()[name], buffers_of(10)[name]) for name in SECTIONS[:1])
    assert restore.staged is None


def test_every_read_shows_that_it_goes_on(tmp_path: Path) -> None:
    """The guardian takes the lease from a trainer that shows nothing for a while."""
    saved(storage(tmp_path, "run"), 10)
    file = tmp_path / "run/step_00000010/nodes/a/inner.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    moments = {name: torch.zeros(layout().numel) for name in ("exp_avg", "exp_avg_sq")}
    views = views_of(layout().slots, moments)
    inner: Any = SimpleNamespace(named_moments=lambda: views, forget_moments=lambda: None)
    shown: list[None] = []
    restore, buffers = restorer(tmp_path, on_piece=lambda: shown.append(None))
    reads = (lambda: restore.restore(buffers, 10), lambda: restore.stage(10, SECTIONS))
    counts = [(read(), len(shown))[1] for read in reads]
    assert not restore.load_inner(10, inner, inner), "damaged, which the end of the file shows"
    assert 0 < counts[0] < counts[1] < len(shown)


def test_damaged_checkpoint_is_not_staged(tmp_path: Path) -> None:
    saved(storage(tmp_path, "run"), 10)
    file = tmp_path / "run/step_00000010/outer/momentum.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x7f")
    restore, _ = restorer(tmp_path)
    with pytest.raises(RecoveryFailed, match=r"outer/momentum\.safetensors"):
        restore.stage(10, SECTIONS)
    assert restore.staged is None


@pytest.mark.parametrize(
    ("path", "other", "step", "said"),
    [
        (None, None, None, "--resume needs ckpt.path"),
        ("ckpt", "", None, "is not <ckpt.path>/<run.id>"),
        ("ckpt", "there/a run", None, "is not <ckpt.path>/<run.id>"),
        ("ckpt", "there/run/step_00000010", 20, "names step 10, resume.step=20"),
    ],
)
def test_source_that_makes_no_sense_is_refused(
    path: str | None, other: str | None, step: int | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        source_of(path, "run", "a", other=other, step=step)
