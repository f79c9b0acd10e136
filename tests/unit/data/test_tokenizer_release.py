"""A tokenizer is what it does: its fingerprint follows from ids, whichever release of the library gives them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.data.prepared import config_of, drawn_ids, write_set

from zeroband.config.data import DataConfig, TextSource
from zeroband.data.tokenizer import Tokenizer, open_tokenizer
from zeroband.data.tokens import prepare
from zeroband.errors import ConfigError, JoinRefused

tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
transformers = pytest.importorskip("transformers", reason="needs the extra hf")

OTHER_RELEASE = "transformers==4.57.1"
RECORDED = {
    "gpt2": "hf2/257/cb895cdc9ee7eb8105ab7a668dd984f4",
    "bert": "hf2/3/d68dc7421e84caf156d8efc28dcdbffe",
}
"""As transformers 4.57.1 (tokenizers 0.22.2) and 5.23.0 (0.23.3) give them; what they serialise differs."""


def _gpt2() -> Any:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("Ġ", "Ġ")]
    vocabulary = {token: id for id, token in enumerate([*alphabet, "<unk>", "<|endoftext|>", *map("".join, merges)])}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def _bert() -> Any:
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "quick",
        "##ly",
        "a",
        "b",
        "c",
        "1",
        "##2",
        ",",
        "naive",
    ]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = tokenizers.normalizers.BertNormalizer()
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return made


KINDS = {
    "gpt2": (_gpt2, {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}),
    "bert": (_bert, {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", "do_lower_case": True}),
}


def written(folder: Path, kind: str, change: Any = None) -> Path:
    """A folder of a tokenizer, with the files from which each release makes the class; `change`: of tokenizer.json."""
    make, settings = KINDS[kind]
    content = json.loads(make().to_str())
    if change is not None:
        change(content)
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(content))
    vocabulary = content["model"]["vocab"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, content["model"].get("merges", []))]))
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "model_max_length": 64}))
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_is_the_recorded_one_of_other_releases(tmp_path: Path, kind: str) -> None:
    assert open_tokenizer(str(written(tmp_path / kind, kind))).fingerprint == RECORDED[kind]


@pytest.mark.soak
def test_another_release_gives_the_recorded_fingerprints(tmp_path: Path) -> None:
    uv = Path(sys.executable).parent / "uv"
    install = [uv, "pip", "install", "-q", "--python", sys.executable, "--target", tmp_path / "lib", OTHER_RELEASE]
    subprocess.run(install, check=True)
    folders = [str(written(tmp_path / kind, kind)) for kind in KINDS]
    code = "import sys; from zeroband.data.tokenizer import open_tokenizer\n"
    code += "print(*(open_tokenizer(folder).fingerprint for folder in sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "lib"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", code, *folders], env=environment, check=True, capture_output=True, text=True
    )
    assert ran.stdout.split() == [RECORDED[kind] for kind in KINDS]


def _merge_other_things(content: dict[str, Any]) -> None:
    content["model"]["merges"][3] = ["2", "1"]
    content["model"]["vocab"] = {
        "21" if token == "12" else token: id for token, id in content["model"]["vocab"].items()
    }


def _add_digits(content: dict[str, Any]) -> None:
    digits = {"type": "Digits", "individual_digits": True}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, content["pre_tokenizer"]]}


def _fill_blanks_of_a_token(content: dict[str, Any]) -> None:
    flags = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False, "special": False}
    content["added_tokens"] = [{"id": 255, "content": "Ġ", **flags}]


CHANGES = [_merge_other_things, _add_digits, _fill_blanks_of_a_token]


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_changes_with_the_ids(tmp_path: Path, change: Any) -> None:
    backend = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    found: list[Tokenizer] = []
    for name, how in (("as it was", None), ("changed", change)):
        folder = written(tmp_path / name, "gpt2", how)
        (folder / "tokenizer_config.json").write_text(json.dumps(backend))
        found.append(open_tokenizer(str(folder)))
    assert found[0].fingerprint != found[1].fingerprint


def test_fingerprint_of_an_earlier_version_is_known(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(folder := str(written(tmp_path / "gpt2", "gpt2")))
    serialised = transformers.AutoTokenizer.from_pretrained(folder).backend_tokenizer.to_str()
    before = f"hf/257/{hashlib.blake2b(serialised.encode(), digest_size=16).hexdigest()}"
    assert tokenizer.matches(before) and tokenizer.matches(tokenizer.fingerprint)
    assert not tokenizer.matches("hf/257/0")


def test_text_that_gives_no_ids_is_no_document(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(("the quick", "\u200b \u00ad", " ", "a, b")):  # format characters are dropped by BERT
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    source = TextSource(paths=(f"{tmp_path}/texts/*",))
    tokenizer = str(written(tmp_path / "bert", "bert"))
    store = prepare(DataConfig(source=source, tokenizer=tokenizer, cache_dir=tmp_path / "cache"), seed=0)
    assert store.read(0, len(store)).tolist() == [5, 6, 3, 8, 13, 9, 3]
    assert (store.manifest.documents, store.manifest.empty_documents) == (2, 2)  # type: ignore[attr-defined]


def test_refusal_at_join_names_both_releases() -> None:
    from zeroband.elastic.store.interface import REMARK, require_equal

    key = "data.tokenizer (ids)"
    theirs = {key: "hf2/1/a", f"{REMARK}{key}": "transformers 4.57.1"}
    ours = {key: "hf2/1/b", f"{REMARK}{key}": "transformers 5.23.0"}
    with pytest.raises(
        JoinRefused, match=r"hf2/1/a \(transformers 4\.57\.1\).* and .hf2/1/b \(transformers 5\.23\.0\)"
    ):
        require_equal(theirs, ours)
    require_equal(theirs, {**ours, key: "hf2/1/a"})
    require_equal(theirs, {key: "hf2/1/a"})


def test_refusal_of_prepared_ids_names_both_releases(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(str(written(tmp_path / "gpt2", "gpt2")))
    made_by = {"tokenizer": "gpt2", "tokenizer_fingerprint": "hf2/257/0", "tokenizer_release": "transformers 4.0.0"}
    write_set(tmp_path / "set", [drawn_ids(300)], **made_by)
    data = config_of(tmp_path / "set", tmp_path / "cache", tokenizer=str(tmp_path / "gpt2"))
    with pytest.raises(
        ConfigError, match=rf"\({tokenizer.release}\) does not produce the ids .*\(transformers 4\.0\.0\)"
    ):
        prepare(data, seed=0)
    write_set(tmp_path / "set", [drawn_ids(300)], **{**made_by, "tokenizer_fingerprint": tokenizer.fingerprint})
    prepare(data, seed=0).close()
