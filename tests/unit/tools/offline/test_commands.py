"""`zeroband export`, `eval` and `sample` on checkpoints: what they print, what they refuse, and their exit codes."""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.export.trained import CORPUS, TINY, save, trained_of
from torch.nn import functional as F

from zeroband.checkpoint.storage import open_storage
from zeroband.config.data import ChatSource
from zeroband.data.index import SampleIndex, flat_layout
from zeroband.data.token_store import TokenStore
from zeroband.data.tokens import prepare
from zeroband.export import directory
from zeroband.export.directory import TrainedModel
from zeroband.tools.offline import chat, evaluate, export, sample

HELD_OUT = 0.05

Talk = Callable[[str], list[bytes]]


@pytest.fixture
def tokens(tmp_path: Path) -> TokenStore:
    return prepare(CORPUS.data.model_copy(update={"cache_dir": tmp_path / "cache"}), CORPUS.seed)


@pytest.fixture
def trained() -> TrainedModel:
    return trained_of(TINY)


@pytest.fixture
def run(trained: TrainedModel, tokens: TokenStore, tmp_path: Path) -> str:
    data = CORPUS.data.model_copy(update={"cache_dir": tmp_path / "cache", "hold_out": HELD_OUT})
    corpus = replace(CORPUS, data=data, fingerprint=tokens.fingerprint)
    save(open_storage(str(tmp_path / "ck"), "demo", "a"), 10, trained, data=corpus.to_record())
    return str(tmp_path / "ck" / "demo")


def shown(text: str, label: str) -> float:
    found = re.search(rf"^{label} +([\d.]+)", text, flags=re.MULTILINE)
    assert found is not None, text
    return float(found[1])


def test_eval_gives_the_mean_over_every_held_out_target(
    run: str, trained: TrainedModel, tokens: TokenStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.main([run, "--device", "cpu", "--batch-size", "3"]) == 0
    index = SampleIndex(flat_layout(len(tokens), 32), 99, HELD_OUT)
    model, nats, targets, n_bytes = trained.build(torch.device("cpu")), 0.0, 0, 0
    for start, stop in index.spans(index.held_out_positions(512)).tolist():
        ids = torch.as_tensor(tokens.read(start, stop).astype("int64"))
        begins = [place for place, token in enumerate(ids[:-1].tolist()) if place == 0 or token == 256]
        borders = torch.tensor([*begins, len(ids) - 1], dtype=torch.int32)
        with torch.no_grad():
            nats += F.cross_entropy(model(ids[None, :-1], borders)[0], ids[1:], reduction="sum").item()
        targets += len(ids) - 1
        n_bytes += int((ids[1:] < 256).sum())
    out = capsys.readouterr().out
    assert targets > n_bytes > 100
    assert f"{targets} tokens, {n_bytes} bytes of text" in out
    assert shown(out, "loss") == pytest.approx(nats / targets, rel=1e-5)
    assert shown(out, "bits per byte") == pytest.approx(nats / n_bytes / math.log(2), rel=1e-5)


def test_eval_takes_the_data_of_another_configuration(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a longer text that nobody trained on. " * 100)
    path = tmp_path / "other.toml"
    path.write_text(
        f'[data]\nseq_length = 16\nhold_out = 0.4\ncache_dir = "{tmp_path / "cache"}"\n'
        f'source = {{ type = "text", paths = ["{tmp_path / "text"}"] }}\n[outer]\ntype = "ddp"\n'
    )
    assert evaluate.main([run, f"@{path}", "--samples", "5", "--device", "cpu"]) == 0
    assert "samples of 16 tokens, 5 used" in capsys.readouterr().out


@pytest.mark.slow
def test_eval_of_an_export_gives_what_its_checkpoint_gives(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    assert export.main([run, str(tmp_path / "out"), "--dtype", "float32", "--no-parity"]) == 0
    path = tmp_path / "run.toml"
    path.write_text(
        f'[run]\nseed = {CORPUS.seed}\n[data]\ntokenizer = "byte"\nseq_length = 32\nhold_out = {HELD_OUT}\n'
        f'cache_dir = "{tmp_path / "cache"}"\nsource = {{ type = "synthetic", documents = 40 }}\n'
    )
    shown_of: list[list[str]] = []
    for argv in ([run], [str(tmp_path / "out"), f"@{path}"]):
        capsys.readouterr()
        assert evaluate.main([*argv, "--device", "cpu"]) == 0
        shown_of.append(capsys.readouterr().out.splitlines()[1:])  # the first line names the checkpoint
    assert shown_of[0] == shown_of[1]


@pytest.mark.parametrize(
    ("changes", "flags", "complaint"),
    [
        ({"fingerprint": "other"}, [], "data.source holds another text now than when step 10 of run demo was trained"),
        ({"data": {"hold_out": 0.0}}, [], "data.hold_out=0 keeps no sample back"),
        ({"data": {"private": True}}, [], "was trained on documents of its nodes' own, of which it records nothing"),
        ({}, ["--data.hold_out=0.2"], "--data.hold_out=0.2 changes a configuration, and none is named"),
        ({}, ["--device", "tpu9"], "--device=tpu9: "),
        ({}, ["@nowhere.toml"], "nowhere.toml"),
    ],
)
def test_eval_refuses_what_would_mislead(
    changes: dict[str, Any],
    flags: list[str],
    complaint: str,
    trained: TrainedModel,
    tokens: TokenStore,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    section = CORPUS.data.model_copy(update={"cache_dir": tmp_path / "cache"} | changes.get("data", {}))
    record = replace(CORPUS, data=section, fingerprint=tokens.fingerprint).to_record()
    record |= {key: value for key, value in changes.items() if key != "data"}
    save(open_storage(str(tmp_path / "ck"), "demo", "a"), 10, trained, data=record)
    assert evaluate.main([str(tmp_path / "ck" / "demo"), *flags]) == 2
    assert complaint in capsys.readouterr().err


def sampler(model: TrainedModel, *flags: str) -> sample.Sampler:
    options = sample.parser_for_sampling("sample", None).parse_args(["ck", *flags])
    return sample.Sampler(model, torch.device("cpu"), options)


def test_sample_repeats_itself_and_begins_with_the_prompt(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    for seed in ("1", "1", "2"):
        assert sample.main([run, "--prompt", "def ", "--tokens", "24", "--seed", seed, "--device", "cpu"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != said[2]
    assert all(text.startswith("def ") for text in said)


def test_sample_sees_the_prompt_behind_the_end_of_a_document(run: str, trained: TrainedModel) -> None:
    text = sampler(trained, "--tokens", "1", "--temperature", "0").continuation("ab")
    with torch.no_grad():
        likeliest = trained.build(torch.device("cpu"))(torch.tensor([[256, 97, 98]]))[0, -1].argmax().item()
    assert text == trained.tokenizer.decode([likeliest])


def test_sample_ends_with_the_document(trained: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def generate(_: object, prompt: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(prompt.tolist())
        return torch.cat((prompt, torch.tensor([*b"hi", 256, *b"more"])))

    monkeypatch.setattr("zeroband.model.generate", generate)
    assert sampler(trained, "--tokens", "7").continuation("x") == "hi"
    assert asked == [[256, ord("x")]]


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--temperature", "nan"], ["--tokens", "0"]])
def test_sample_refuses_bad_numbers(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        sample.main(["ck", *flags])
    assert ended.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_export_says_that_nothing_was_compared_without_transformers(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert export.main([run, str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "step 10 of run demo as bfloat16" in out
    assert "not checked: transformers is not installed; install the extra `hf`: " in out
    assert (tmp_path / "out" / "config.json").exists()


@pytest.mark.slow
def test_export_prints_the_parity_with_transformers(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    assert export.main([run, str(tmp_path / "out"), "--dtype", "float32"]) == 0
    found = re.search(r"parity +equal to .* max \|difference\| (\S+) over 20480 logits", capsys.readouterr().out)
    assert found is not None and float(found[1]) <= 1e-5


@pytest.mark.slow
def test_export_ends_with_1_where_transformers_computes_something_else(
    run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs the extra hf")
    honest = directory.write_directory
    monkeypatch.setattr(
        directory, "write_directory", lambda _, out, dtype: honest(trained_of(TINY, seed=5), out, dtype)
    )
    assert export.main([run, str(tmp_path / "out")]) == 1
    assert "NOT EQUAL" in capsys.readouterr().out


def test_export_into_a_folder_in_use_is_refused_before_anything_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("")
    assert export.main(["no/such/checkpoint", str(tmp_path)]) == 2
    assert "exists already, and an export never overwrites" in capsys.readouterr().err


@pytest.mark.parametrize("command", [chat.main, evaluate.main, sample.main, lambda argv: export.main([*argv, "out"])])
def test_missing_checkpoint_is_an_error_without_a_traceback(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["no/such/checkpoint"]) == 2
    assert "no/such/checkpoint is no folder" in capsys.readouterr().err


# -- of a run on conversations --------------------------------------------------------------------------------------


@pytest.fixture
def chats(trained: TrainedModel, tmp_path: Path) -> str:
    """A run in which users ask `2+2` and the assistant answers with one character."""
    pytest.importorskip("transformers", reason="needs the extra hf")
    lines = [
        {"messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": letter}]}
        for letter in "abcdefghijkl"
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    source = ChatSource(type="chat", paths=(str(path),))
    data = CORPUS.data.model_copy(update={"source": source, "cache_dir": tmp_path / "cache", "hold_out": 0.3})
    corpus = replace(CORPUS, data=data, fingerprint=prepare(data, CORPUS.seed).fingerprint)
    save(open_storage(str(tmp_path / "ck"), "demo", "a"), 10, trained, data=corpus.to_record())
    return str(tmp_path / "ck" / "demo")


def test_eval_counts_what_the_assistant_says_alone(chats: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([chats, "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "held out         4 samples of 32 tokens, 4 used" in out
    assert "8 tokens, 4 bytes of text" in out


def test_sample_asks_as_a_user_and_ends_with_the_answer(
    chats: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bytes] = []

    def generate(_: object, prompt: torch.Tensor, **options: object) -> torch.Tensor:
        asked.append(bytes(prompt.tolist()))
        return torch.cat((prompt, torch.tensor([*b"four", 256, *b"more"])))

    monkeypatch.setattr("zeroband.model.generate", generate)
    assert sample.main([chats, "--prompt", "2+2", "--device", "cpu"]) == 0
    assert asked == [b"<|user|>\n2+2\n<|assistant|>\n"]
    assert capsys.readouterr().out.rstrip().endswith("four")


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Type two lines at a checkpoint, whose model always says `four`; returns what it was asked."""

    def run(checkpoint: str) -> list[bytes]:
        asked: list[bytes] = []

        def generate(_: object, prompt: torch.Tensor, **options: object) -> torch.Tensor:
            asked.append(bytes(prompt[prompt != 256].tolist()))
            return torch.cat((prompt, torch.tensor([*b"four", 256, *b"more"])))

        monkeypatch.setattr("zeroband.model.generate", generate)
        monkeypatch.setattr(sys, "stdin", io.StringIO("2+2\nsure?\n"))
        assert chat.main([checkpoint, "--device", "cpu"]) == 0
        return asked

    return run


def test_chat_remembers_what_was_said(chats: str, talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    first = b"<|user|>\n2+2\n<|assistant|>\n"
    before, after = talk(chats)
    assert before == first
    assert after.startswith(first + b"four") and after.endswith(b"<|user|>\nsure?\n<|assistant|>\n")
    said = capsys.readouterr()
    assert said.out.split() == ["four", "four"] and "The model answers; Ctrl-D ends." in said.err


def test_chat_with_a_model_of_text_continues_all_of_it(
    run: str, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(run) == [b"2+2\n", b"2+2\nfoursure?\n"]
    assert "The model continues your text" in capsys.readouterr().err
