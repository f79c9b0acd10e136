from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.buckets import gcs_server
from tests.text_server import text_server, without_sizes
from tests.unit.data.made_tokenizers import byte_level
from tests.unit.data.prepared import FileServer
from tests.unit.tools.data.preparations import END, bytes_of, ids_of, manifest_of, prepare, texts_of, write_lines

from zeroband.checkpoint.storage import LocalStorage, ObjectStorage
from zeroband.data import files
from zeroband.data.shard_set import block_hashes, hashes_digest
from zeroband.errors import ConfigError
from zeroband.tools.data.folder import Folder, find_duplicates, flags_file, flags_of, open_out
from zeroband.tools.data.inspect import main as inspect

TEXTS = [f"{n} {'ünï' * (n % 7)}" for n in range(50)]
SMALL = ("--unit-mb", "0.0004")
"""Units of 400 bytes."""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "a.jsonl", TEXTS)


def write_parquet(path: Path, values: list[Any], *, rows: int = 7, column: str = "text", kind: Any = None) -> Path:
    pq.write_table(pa.table({column: pa.array(values, type=kind)}), path, row_group_size=rows)
    return path


@pytest.mark.parametrize("unit_bytes", [97, 200, 10_000_000])
def test_documents_come_once_and_in_order_however_small_the_units(lines: Path, out: Path, unit_bytes: int) -> None:
    assert prepare(lines, out, "--unit-mb", unit_bytes / 1e6) == 0
    assert texts_of(out) == TEXTS
    assert (len(manifest_of(out).shards) == 1) == (unit_bytes > 10_000)


def test_lines_without_a_last_newline_or_with_blank_ones_are_the_same_documents(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n{"text": "a"}\n\n \n{"text": "b"}\r\n{"text": "c"}')
    for size in range(9, 16):
        assert prepare(path, out, "--unit-mb", size / 1e6, "--start-over") == 0
        assert texts_of(out) == ["a", "b", "c"]


def test_parquet_text_and_compressed_files_of_a_folder_are_read_in_the_order_of_their_names(
    tmp_path: Path, out: Path
) -> None:
    folder = tmp_path / "folder"
    (folder / "below" / ".hidden").mkdir(parents=True)
    write_parquet(folder / "a.parquet", TEXTS[:20])
    (folder / "b.txt").write_text("whole\nfile")
    (folder / "below" / "c.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    (folder / "below" / "d.jsonl.zst").write_bytes(pa.compress(b'{"text": "zst"}\n', "zstd", asbytes=True))
    for name in ("README.md", "dataset_info.json", "below/.hidden/e.txt"):
        (folder / name).write_text("not data")
    assert prepare(folder, out, *SMALL) == 0
    assert texts_of(out) == [*TEXTS[:20], "whole\nfile", "packed", "zst"]


def test_file_that_two_sources_name_is_read_once(lines: Path, out: Path) -> None:
    other = write_lines(lines.with_name("b.jsonl"), ["other"])
    assert prepare(lines, lines.parent / "*.jsonl", out) == 0
    assert texts_of(out) == [*TEXTS, "other"]
    with pytest.raises(ConfigError, match=r"b\.jsonl: earlier sources already contain all of its files"):
        prepare(lines.parent / "*.jsonl", other, out.with_name("again"))


def test_data_sets_of_hugging_face_are_read_by_rows(tmp_path: Path, out: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs the extra hf")
    data = datasets.Dataset.from_dict({"body": TEXTS})
    data.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"tiny": data}).save_to_disk(tmp_path / "splits")
    for name in (f"hf:{tmp_path / 'saved'}", f"hf:{tmp_path / 'splits'}::tiny"):
        assert prepare(name, out, "--column", "body", *SMALL, "--start-over") == 0
        assert texts_of(out) == TEXTS and len(manifest_of(out).shards) == 3
    with pytest.raises(ConfigError, match=r"no column 'text' \(--column\); it has 'body'"):
        prepare(f"hf:{tmp_path / 'saved'}", tmp_path / "other")


def test_column_of_integers_is_taken_as_ids(tmp_path: Path, out: Path) -> None:
    rows = [[1, 2], [], None, [3, END], [4, END, 5], [END]]
    path = write_parquet(tmp_path / "a.parquet", rows, rows=2, column="ids", kind=pa.list_(pa.int32()))
    assert prepare(path, out, "--column", "ids") == 0
    assert ids_of(out) == [1, 2, END, 3, END, 4, END, 5, END]
    found = manifest_of(out)
    assert (found.documents, found.empty_documents) == (4, 3)


def test_duplicates_of_ids_are_documents_however_they_lie_in_rows(tmp_path: Path, out: Path) -> None:
    rows = [[1, 2], [1, 2, END], [1, 2, END, 3, END], [3], [4, END, 1, 2], [END], []]
    path = write_parquet(tmp_path / "a.parquet", rows, rows=2, kind=pa.list_(pa.int32()))
    again = write_parquet(tmp_path / "b.parquet", [[3, END, 5]], kind=pa.list_(pa.int64()))
    assert prepare(path, again, out, "--dedup", "--unit-mb", "0.00001") == 0
    assert ids_of(out) == [1, 2, END, 3, END, 4, END, 5, END]
    found = manifest_of(out)
    assert (found.documents, found.duplicate_documents, found.empty_documents) == (4, 5, 2)


def test_id_that_the_tokenizer_does_not_have_is_named(tmp_path: Path, out: Path) -> None:
    for wrong in (257, -1):
        path = write_parquet(tmp_path / "a.parquet", [[1], [2], [3, wrong]], kind=pa.list_(pa.int64()))
        with pytest.raises(
            ConfigError, match=rf"a\.parquet, row 2: id {wrong} is outside the 257 ids of --tokenizer byte"
        ):
            prepare(path, out, "--start-over")


def test_manifest_and_hashes_say_what_the_shards_hold(lines: Path, out: Path) -> None:
    assert prepare(lines, out, *SMALL) == 0
    found = manifest_of(out)
    shards = [np.load(out / shard.name) for shard in found.shards]
    hashes = np.load(out / "hashes.npy")
    assert hashes.tolist() == [h for ids in shards for h in block_hashes(ids, found.block_tokens).tolist()]
    assert found.hashes == hashes_digest(hashes) and len(hashes) == found.n_blocks
    assert [len(ids) for ids in shards] == [shard.tokens for shard in found.shards]
    assert [int((ids == END).sum()) for ids in shards] == [shard.documents for shard in found.shards]
    assert (found.dtype, found.tokenizer, found.sources) == ("<u2", "byte", (str(lines),))


def test_duplicates_are_left_out_behind_the_first_one_whoever_is_faster(tmp_path: Path, out: Path) -> None:
    copies = [*TEXTS[::-1], "", *TEXTS, "new", "new", ""]
    first, second = write_lines(tmp_path / "a.jsonl", copies), write_lines(tmp_path / "b.jsonl", ["new", "newer"])
    orders = [list, reversed, lambda tasks: random.Random(0).sample(tasks, len(tasks))]
    found = []
    for number, order in enumerate(orders):
        folder = out / str(number)
        assert prepare(first, second, folder, "--dedup", *SMALL, order=order) == 0
        assert texts_of(folder) == [*TEXTS[::-1], "new", "newer"]
        found.append(bytes_of(folder))
    assert found[0] == found[1] == found[2]
    assert (manifest_of(folder).duplicate_documents, manifest_of(folder).empty_documents) == (len(TEXTS) + 2, 2)


def test_duplicates_are_found_in_any_number_of_partitions(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    texts = rng.integers(1, 1 << 63, (60, 2)).astype(np.uint64)
    texts[0] = 0  # an empty document, of which none is a copy
    drawn = rng.integers(0, 60, 300)
    expected = [bool(text) and text in drawn[:place] for place, text in enumerate(drawn)]
    folder = Folder(open_out(str(tmp_path / "out")))
    for unit in range(3):
        folder.write_document_hashes(unit, texts[drawn[100 * unit : 100 * (unit + 1)]])
    for partition in (1, 7, 1 << 22):
        (scratch := tmp_path / str(partition)).mkdir()
        spans = find_duplicates(folder, folder.hashed(), scratch, partition=partition)
        flags = [flags_of(str(flags_file(scratch)), *spans[unit]) for unit in range(3)]
        assert np.concatenate(flags).tolist() == expected, partition


def test_documents_are_left_out_for_their_length_in_tokens(tmp_path: Path, out: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["a" * n for n in (1, 2, 3, 4, 5)])
    assert prepare(path, out, "--min-tokens", 2, "--max-tokens", 4) == 0
    assert list(map(len, texts_of(out))) == [2, 3, 4]
    assert manifest_of(out).filtered_documents == 2


def test_packed_documents_fill_bins_and_lose_nothing(lines: Path, out: Path) -> None:
    long = write_lines(lines.with_name("b.jsonl"), ["x" * 100, "short"])
    assert prepare(lines, long, out, "--pack", "best-fit", "--seq-length", 32, *SMALL) == 0
    found = manifest_of(out)
    assert found.packed_length == 32 and all(shard.tokens % 32 == 0 for shard in found.shards)
    assert sorted(texts_of(out)) == sorted([*TEXTS, "x" * 100, "short"])
    assert found.padding == found.tokens - sum(len(text.encode()) + 1 for text in (*TEXTS, "x" * 100, "short"))
    bins = np.array(ids_of(out)).reshape(-1, 32)
    assert [row.tolist() for row in bins if row[0] == ord("x")][:3] == [[ord("x")] * 32] * 3


def test_dry_run_says_what_would_be_read_and_writes_nothing(
    lines: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(lines, out, *SMALL, "--dry-run") == 0
    said = capsys.readouterr().out
    assert f"{lines}: 1 x jsonl" in said and "shards at most" in said and "257 ids" in said
    assert not out.exists()


def test_end_says_what_was_left_out_and_how_to_train_on_it(
    tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, empty = write_lines(tmp_path / "a.jsonl", ["a", "", "a", "abc"]), write_lines(tmp_path / "b.jsonl", [None])
    assert prepare(path, empty, out, "--dedup", "--max-tokens", 2) == 0
    said = capsys.readouterr()
    assert "dropped   2 empty, 1 duplicates, 1 for their length" in said.out
    assert f'[data.source]\ntype = "tokens"\npath = "{out}"' in said.out
    assert f"{empty} contributed no document" in said.err


def test_finished_set_is_left_alone(lines: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prepare(lines, out) == 0
    before = bytes_of(out)
    assert prepare(lines, out) == 0
    assert "is finished already" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"holds a finished set of other sources, .*--start-over"):
        prepare(lines, out, "--min-tokens", 2)
    assert bytes_of(out) == before
    assert prepare(lines, out, "--min-tokens", 100, "--max-tokens", 101, "--start-over", "--dry-run") == 0
    assert bytes_of(out) == before


class Killed(BaseException):
    """The process ends here."""


def interrupt(tasks: list[Any]) -> Iterator[Any]:
    """An order of tasks: two, and Ctrl-C."""
    yield from tasks[:2]
    raise KeyboardInterrupt


@pytest.mark.parametrize("flags", [(), ("--dedup", "--pack", "best-fit", "--seq-length", "16")])
def test_preparation_that_ends_at_any_write_goes_on_to_the_same_bytes(
    lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Each write is cut before it, with half of the file beside its place, or right behind it."""
    arguments = (lines, *flags, "--unit-mb", "0.0012")
    assert prepare(*arguments, tmp_path / "whole") == 0
    expected = bytes_of(tmp_path / "whole")
    write, left, kills = LocalStorage.write, [0], 0

    def cut(storage: LocalStorage, path: str, pieces: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            place = Path(storage.url) / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.with_name(f".{place.name}._prepare").write_bytes(b"half")
            raise Killed
        write(storage, path, pieces)

    monkeypatch.setattr(LocalStorage, "write", cut)
    for number in range(1, 100):
        out, left[0] = tmp_path / str(number), number
        try:
            assert prepare(*arguments, out) == 0
        except Killed:
            kills += 1
        else:
            break
        assert prepare(*arguments, out) == 0
        assert bytes_of(out) == expected
    assert kills > 6


@pytest.fixture
def memory() -> Iterator[str]:
    """A folder of a store whose files hold half of what is written to them when a writer ends."""
    yield "memory://prepared"
    fsspec.filesystem("memory").rm("/prepared", recursive=True)


@pytest.fixture
def gs(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with gcs_server("prepared", monkeypatch):
        yield "gs://prepared"


def stored(url: str) -> dict[str, bytes]:
    """Every file below a URL."""
    system, root = fsspec.url_to_fs(url, skip_instance_cache=True)
    found = {path.lstrip("/"): system.cat_file(path) for path in system.find(root)}
    return {path.removeprefix(f"{root.strip('/')}/"): content for path, content in found.items()}


@pytest.mark.slow
def test_preparation_to_a_url_that_is_cut_in_a_write_goes_on_to_the_same_bytes(
    lines: Path, tmp_path: Path, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written of a file up to there lies at its place."""
    arguments = (lines, "--dedup", "--pack", "best-fit", "--seq-length", "16", "--unit-mb", "0.0012")
    assert prepare(*arguments, tmp_path / "whole") == 0
    expected = bytes_of(tmp_path / "whole")
    write, cut = ObjectStorage.write, list[str]()

    def write_half(storage: ObjectStorage, path: str, pieces: Any) -> None:
        if cut != [path.rpartition("/")[2]]:
            write(storage, path, pieces)
            return
        cut.clear()
        content = b"".join(pieces)
        write(storage, path, [content[: len(content) // 2]])
        raise Killed

    monkeypatch.setattr(ObjectStorage, "write", write_half)
    for name in ("plan.json", "0-40.npy", "00000.npy", "0.json", "hashes.npy", "manifest.json"):
        cut.append(name)
        with pytest.raises(Killed):
            prepare(*arguments, f"{memory}/{name}")
        assert prepare(*arguments, f"{memory}/{name}") == 0
        assert stored(f"{memory}/{name}") == expected


def test_what_an_earlier_preparation_left_behind_counts_for_no_other_one(lines: Path, out: Path) -> None:
    """--start-over was killed when the plan was gone and records were not."""
    assert prepare(lines, out, *SMALL, "--min-tokens", 1000, order=interrupt) == 130
    (out / "_prepare/plan.json").unlink()
    assert prepare(lines, out, *SMALL) == 0
    assert texts_of(out) == TEXTS


def test_preparation_whose_last_step_is_cut_is_finished_by_the_next(
    lines: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = LocalStorage.remove

    def cut(storage: LocalStorage, path: str) -> None:
        if path == "_prepare":
            raise Killed
        remove(storage, path)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "remove", cut)
        with pytest.raises(Killed):
            prepare(lines, out)
    assert (out / "manifest.json").exists() and (out / "_prepare").exists()
    assert prepare(lines, out) == 0
    assert not (out / "_prepare").exists()


@pytest.fixture
def begun(lines: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """OUT with a plan and some units of `lines` in units of 400 bytes."""
    assert prepare(lines, out, *SMALL, order=interrupt) == 130
    assert "interrupted: 2 of" in capsys.readouterr().err
    return out


def test_interrupted_preparation_says_how_to_go_on(
    begun: Path, lines: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(lines, begun, *SMALL) == 0
    assert "resuming: 2 of" in capsys.readouterr().out
    assert texts_of(begun) == TEXTS


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--min-tokens", "3"), "--min-tokens was None and is 3"),
        (("--dedup",), "--dedup was False and is True"),
    ],
)
def test_other_options_than_those_of_the_beginning_are_refused(
    begun: Path, lines: Path, flags: tuple[str, ...], says: str
) -> None:
    with pytest.raises(ConfigError, match=f"{says}; give the same arguments, another OUT, or --start-over"):
        prepare(lines, begun, *SMALL, *flags)
    assert prepare(lines, begun, *SMALL, *flags, "--start-over") == 0


def test_sources_that_changed_since_the_beginning_are_refused(begun: Path, lines: Path, tmp_path: Path) -> None:
    other = write_lines(tmp_path / "b.jsonl", ["other"])
    with pytest.raises(ConfigError, match=r"added: .*b\.jsonl;"):
        prepare(lines, other, begun, *SMALL)
    with pytest.raises(ConfigError, match=r"added: .*b\.jsonl; removed: .*a\.jsonl;"):
        prepare(other, begun, *SMALL)
    write_lines(lines, [*TEXTS, "more"])
    with pytest.raises(ConfigError, match=r"changed: .*a\.jsonl;"):
        prepare(lines, begun, *SMALL)


def test_sources_in_another_order_are_refused_and_by_other_names_are_not(
    begun: Path, lines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, both = write_lines(tmp_path / "b.jsonl", ["other"]), tmp_path / "both"
    assert prepare(lines, other, both, *SMALL, order=interrupt) == 130
    with pytest.raises(
        ConfigError, match=rf"sources or their order were {lines} {other} and are {other} {lines}; give the"
    ):
        prepare(other, lines, both, *SMALL)
    monkeypatch.chdir(tmp_path)
    assert prepare("./a.jsonl", begun, *SMALL) == 0
    assert prepare(f"file://{lines}", begun, *SMALL) == 0


@pytest.mark.slow
def test_tokenizer_by_another_name_is_the_same_one_if_it_gives_the_same_ids(
    lines: Path, tmp_path: Path, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, merges in (("one", []), ("other", [("0", "1")])):
        byte_level(tmp_path / name, {"01": 256}, merges, end="<end>")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert prepare(lines, out, *SMALL, "--tokenizer", tmp_path / "one", order=interrupt) == 130
    with pytest.raises(
        ConfigError, match=r"--tokenizer was '.*/one' .* and is '.*/other' .*, which produces other ids"
    ):
        prepare(lines, out, *SMALL, "--tokenizer", tmp_path / "other")
    assert prepare(lines, out, *SMALL, "--tokenizer", tmp_path / "copy") == 0
    assert "resuming: 2 of" in capsys.readouterr().out
    assert prepare(lines, out, *SMALL, "--tokenizer", tmp_path / "one") == 0
    assert "is finished already" in capsys.readouterr().out


def test_source_that_changes_in_the_middle_is_named(lines: Path, out: Path) -> None:
    def change(tasks: list[Any]) -> Any:
        yield from tasks[:2]
        write_lines(lines, [*TEXTS, "more"])
        yield from tasks[2:]

    with pytest.raises(ConfigError, match=r"a\.jsonl has changed since this preparation began; .*--start-over"):
        prepare(lines, out, *SMALL, order=change)
    assert not (out / "manifest.json").exists()


def test_place_that_cannot_be_written_to_or_holds_other_files_is_named(lines: Path, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"holds 'thesis\.txt' and no preparation to resume"):
        prepare(lines, out)
    with pytest.raises(ConfigError, match=r"--start-over only removes files .* also holds 'thesis\.txt'"):
        prepare(lines, out, "--start-over")
    assert [path.name for path in out.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match=r"cannot write to .*thesis.*: .*; finished units are kept"):
        prepare(lines, out / "thesis.txt")
    with pytest.raises(ConfigError, match=r"OUT='nosuch://a' cannot be opened"):
        prepare(lines, "nosuch://a")


def test_second_preparation_of_a_folder_is_refused_while_the_first_one_writes(lines: Path, out: Path) -> None:
    def meanwhile(tasks: list[Any]) -> Any:
        with pytest.raises(ConfigError, match="another zeroband data prepare is writing to"):
            prepare(lines, out)
        yield from tasks

    assert prepare(lines, out, order=meanwhile) == 0


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 1}', b"[]"])
def test_half_of_a_manifest_is_named(lines: Path, out: Path, content: bytes) -> None:
    assert prepare(lines, out) == 0
    (out / "manifest.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"manifest\.json is damaged: .*--start-over"):
        prepare(lines, out)
    assert prepare(lines, out, "--start-over") == 0
    assert texts_of(out) == TEXTS


def test_plan_of_another_version_is_named(begun: Path, lines: Path) -> None:
    plan = json.loads((begun / "_prepare/plan.json").read_bytes())
    (begun / "_prepare/plan.json").write_text(json.dumps(plan | {"format": 3}))
    with pytest.raises(ConfigError, match=r"plan\.json cannot be read: format 3, .*--start-over"):
        prepare(lines, begun, *SMALL)


def test_empty_source_among_several_is_named(lines: Path, tmp_path: Path, out: Path) -> None:
    for empty in (
        write_lines(tmp_path / "empty.jsonl", []),
        write_parquet(tmp_path / "empty.parquet", [], kind=pa.string()),
    ):
        with pytest.raises(ConfigError, match=rf"{empty} is empty: 1 empty files; .*--allow-empty"):
            prepare(lines, empty, out)
        assert prepare(lines, empty, out, "--allow-empty", "--start-over") == 0
        assert texts_of(out) == TEXTS


def test_sources_of_which_nothing_is_left_give_no_set(tmp_path: Path, out: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["", None, "ab"])
    with pytest.raises(ConfigError, match=r"no document is left: 2 empty, 0 duplicates, 1 dropped"):
        prepare(path, out, "--min-tokens", 3)
    assert not (out / "manifest.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "a"}\n' * 30 + b'{"text": \n', r"a\.jsonl:31: not a line of JSON"),
        ("a.jsonl", b'{"text": "a"}\n' * 30 + b'{"text": "\xff"}\n', r"a\.jsonl:31: not a line of JSON: 'utf-8'"),
        (
            "a.jsonl",
            b'{"text": "a"}\n' * 30 + b'{"body": 1}\n',
            r"a\.jsonl:31: no field 'text' \(--field\); it has 'body'",
        ),
        ("a.jsonl", b'{"text": "a"}\n' * 30 + b'{"text": 1}\n', r"a\.jsonl:31: 'text' holds a int"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"a\.jsonl:1: --tokenizer cannot encode this text: .*surrogates"),
        ("a.parquet", b"PAR1 and then nothing", r"cannot read .*a\.parquet as Parquet"),
        ("a.txt", b"fine until \xff", r"a\.txt is not text: byte 11 is 0xff.*; .*give --binary"),
    ],
)
def test_broken_source_is_named_with_its_line(tmp_path: Path, out: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        prepare(tmp_path / name, out, *SMALL)


def test_parquet_whose_pages_are_damaged_is_named(tmp_path: Path, out: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", TEXTS)
    content = bytearray(path.read_bytes())
    content[4:400] = bytes(396)
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"cannot read .*a\.parquet"):
        prepare(path, out)


def test_bytes_that_are_no_text_are_taken_where_they_are_asked_for(tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    assert prepare(tmp_path / "a.txt", out, "--binary") == 0
    assert ids_of(out) == [255, 254, END]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--pack", "best-fit"), "--pack best-fit and --seq-length T belong together"),
        (("--seq-length", "8"), "--pack best-fit and --seq-length T"),
        (("--min-tokens", "3", "--max-tokens", "2"), "--min-tokens 3 is above --max-tokens 2"),
        (("--binary", "--tokenizer", "gpt2"), "--binary needs --tokenizer byte"),
        (("--tokenizer", "/nosuch"), "--tokenizer='/nosuch': no such folder"),
    ],
)
def test_options_that_make_no_sense_are_refused(lines: Path, out: Path, flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        prepare(lines, out, *flags)


@pytest.mark.parametrize("flag", ["--max-tokens=0", "--retry-s=-1", "--workers=0", "--unit-mb=0", "--seq-length=1"])
def test_number_out_of_its_bounds_is_refused(
    lines: Path, out: Path, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        prepare(lines, out, flag)
    name, _, value = flag.partition("=")
    assert f"{name}: '{value}': input should be greater than" in capsys.readouterr().err


@pytest.mark.slow
def test_set_in_google_cloud_storage_is_whole(tmp_path: Path, gs: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of shards that are sent in several parts, too: more than 5 MiB."""
    path = write_lines(tmp_path / "a.jsonl", [f"{number} {'x' * 100_000}" for number in range(40)])
    assert prepare(path, tmp_path / "whole", "--dedup", "--unit-mb", 3) == 0
    assert prepare(path, f"{gs}/a/set", "--dedup", "--unit-mb", 3) == 0
    found = stored(f"{gs}/a/set")
    assert found == bytes_of(tmp_path / "whole") and max(map(len, found.values())) > 5 << 20
    assert inspect([f"{gs}/a/set", "--verify"]) == 0
    assert "files are whole" in capsys.readouterr().out


# -- sources on servers ------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path, lines: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    """Has `a.jsonl` and `b.parquet`, which hold TEXTS each; nobody pauses between two attempts."""
    monkeypatch.setattr(files, "pause", lambda _: False)
    folder = tmp_path / "served"
    folder.mkdir()
    shutil.copy(lines, folder)
    write_parquet(folder / "b.parquet", TEXTS)
    with text_server(folder) as serving:
        yield serving


@pytest.mark.slow
def test_source_whose_server_goes_on_failing_is_named_with_the_way_out(server: FileServer, out: Path) -> None:
    says = (
        rf"^{server.url}/a.jsonl: the storage failed for 0 s, last with 503: .*; run the same command again "
        "when it has recovered, or raise --retry-s$"
    )

    def fails_from_now_on(tasks: list[Any]) -> list[Any]:
        server.fault = lambda request: request.refuse(503)
        return tasks

    for order in (fails_from_now_on, list):  # when units are made, and when sources are listed
        with pytest.raises(ConfigError, match=says):
            prepare(f"{server.url}/a.jsonl", out, *SMALL, "--retry-s", 0, order=order)


@pytest.mark.slow
def test_lines_of_a_server_that_sends_whole_files_are_one_unit(
    server: FileServer, out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(f"{server.url}/a.jsonl", out, *SMALL) == 0
    assert texts_of(out) == TEXTS and len(manifest_of(out).shards) > 1
    server.knows_ranges = False
    with pytest.raises(ConfigError, match="holds a finished set of other sources"):
        prepare(f"{server.url}/a.jsonl", out, *SMALL)
    assert prepare(f"{server.url}/a.jsonl", out, *SMALL, "--start-over") == 0
    assert texts_of(out) == TEXTS and len(manifest_of(out).shards) == 1
    said = f"the server does not support ranges; one worker reads the whole file file={server.url}/a.jsonl"
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_file_whose_size_nobody_says_is_read_alone_and_beside_others(
    server: FileServer, tmp_path: Path, out: Path
) -> None:
    (tmp_path / "served" / "c.txt").write_text("unknown")
    (tmp_path / "served" / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "packed"}\n'))
    server.fault = without_sizes
    unsaid = [f"{server.url}/{name}" for name in ("c.txt", "a.jsonl", "d.jsonl.gz")]
    assert prepare(unsaid[0], out / "alone") == 0
    assert texts_of(out / "alone") == ["unknown"]
    assert prepare(*unsaid, write_lines(tmp_path / "e.jsonl", ["said"]), out / "beside") == 0
    assert texts_of(out / "beside") == ["unknown", *TEXTS, "packed", "said"]
    with pytest.raises(ConfigError, match=r"does not report the size of .*b\.parquet, which must be read from its end"):
        prepare(f"{server.url}/b.parquet", out / "table")
