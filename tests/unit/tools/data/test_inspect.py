from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tests.unit.tools.data.preparations import bytes_of, manifest_of, prepare, write_lines

from zeroband.errors import ConfigError
from zeroband.tools.data.inspect import main

TEXTS = [f"document {n} says {'ünï ' * (n % 9)}" for n in range(80)]


@pytest.fixture
def out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert prepare(write_lines(tmp_path / "a.jsonl", [*TEXTS, ""]), tmp_path / "out", "--unit-mb", "0.0008") == 0
    capsys.readouterr()
    return tmp_path / "out"


def test_inspect_says_what_a_set_is_with_whole_beginnings_of_documents(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(out), "--samples", "5"]) == 0
    said = capsys.readouterr().out
    found = manifest_of(out)
    assert f"{found.tokens}, documents 80, " in said and "1 empty, 0 duplicates" in said and "uint16" in said
    assert f"{(found.tokens) / 80:.1f} each" in said and "byte: 257 ids, 256 ends a document" in said
    samples = [part.partition("\n")[2].rstrip("\n") for part in said.split("\n--- ")[1:]]
    assert len(samples) == 5 and all(any(text.startswith(s) for text in TEXTS) for s in samples if s)
    assert main([str(out), "--samples", "5"]) == 0
    assert capsys.readouterr().out == said


def test_verify_finds_every_file_that_is_not_whole(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(out), "--verify", "--samples", "0"]) == 0
    assert "files are whole" in capsys.readouterr().out
    chance = random.Random(0)
    for name, content in bytes_of(out).items():
        if name == "manifest.json":
            continue
        place = chance.randrange(len(content))
        changed = bytearray(content)
        changed[place] ^= 1 << chance.randrange(8)
        for damage in (bytes(changed), content[:-1], content + b"\0", b""):
            (out / name).write_bytes(damage)
            assert main([str(out), "--verify", "--samples", "0"]) == 3, (name, place)
            assert f"damaged    {name}\n" in capsys.readouterr().out
        (out / name).unlink()
        assert main([str(out), "--verify", "--samples", "0"]) == 3
        assert f"damaged    {name}\n" in capsys.readouterr().out
        (out / name).write_bytes(content)


def test_samples_are_ids_where_the_tokenizer_is_another_one(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(out), "--tokenizer", "/nosuch"]) == 0
    said = capsys.readouterr()
    assert "showing samples as ids: data.tokenizer='/nosuch'" in said.err
    shown = said.out.split("\n--- ")[1].partition("\n")[2].split()
    assert bytes(map(int, shown)).decode().startswith("document")


def test_packed_set_says_how_much_is_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    assert prepare(path, tmp_path / "out", "--pack", "best-fit", "--seq-length", "64") == 0
    capsys.readouterr()
    assert main([str(tmp_path / "out")]) == 0
    found = manifest_of(tmp_path / "out")
    assert f"padding    {found.padding / found.tokens:.2%}" in capsys.readouterr().out
    ids = np.load(tmp_path / "out" / found.shards[0].name)
    assert found.padding == int(((ids[1:] == 256) & (ids[:-1] == 256)).sum()) > 0


def test_place_without_a_finished_set_is_named(tmp_path: Path, out: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no finished set: it has no manifest\.json"):
        main([str(tmp_path)])
    (out / "manifest.json").write_text('{"format": ')
    with pytest.raises(ConfigError, match=r"manifest\.json is damaged"):
        main([str(out)])


def test_set_at_a_url_is_read_in_ranges(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    for name, content in bytes_of(out).items():
        memory.pipe_file(f"/bucket/set/{name}", content)
    assert main([str(out), "--verify"]) == 0
    said = capsys.readouterr().out
    assert main(["memory://bucket/set", "--verify"]) == 0
    memory.rm("/bucket", recursive=True)
    assert capsys.readouterr().out == said
