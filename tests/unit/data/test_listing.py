"""Nothing that a path names is left out in silence."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest

from zeroband.config.data import JsonlSource
from zeroband.data.files import Files, find_files
from zeroband.data.listing import files_below, files_matching
from zeroband.data.sources import documents, source_identity
from zeroband.data.token_storage import TokenStorage
from zeroband.data.tokenizer import ByteTokenizer
from zeroband.errors import ConfigError
from zeroband.tools.data.plan import PrepareOptions, make_plan

NOBODY = 65534
STORED = {
    "data/a/x.jsonl": "file",
    "data/b/x.jsonl": "file",
    "data/b/Y.JSONL": "file",
    "data/b/deep/z.jsonl": "file",
    "data/newest.jsonl": "link",
    "data/linked": "link",
    "far/w.jsonl": "file",
}


def made(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def within(folder: Path, files: list[str]) -> list[str]:
    return [str(Path(file).relative_to(folder)) for file in files]


@pytest.fixture
def as_somebody() -> Iterator[Path]:
    """A folder, seen by a user whom permissions hold."""
    with tempfile.TemporaryDirectory() as name:
        folder = made(Path(name), "a/x.jsonl", "b/x.jsonl", "other/y.jsonl")
        folder.chmod(0o755)
        before = os.geteuid()
        if before == 0:
            os.seteuid(NOBODY)
        yield folder
        os.seteuid(before)
        for path in folder.iterdir():
            path.chmod(0o755)


def close(path: Path) -> None:
    """Take everybody's permissions, as whoever owns the file."""
    user = os.geteuid()
    os.seteuid(os.getuid())
    path.chmod(0)
    os.seteuid(user)


@pytest.mark.parametrize("pattern", ["*/x.jsonl", "**/*.jsonl", "b/*.jsonl", "b/x.jsonl"])
def test_a_folder_that_may_not_be_read_is_refused_by_name(as_somebody: Path, pattern: str) -> None:
    close(as_somebody / "b")
    with pytest.raises(ConfigError, match=rf"{as_somebody}/b\b"):
        find_files([f"{as_somebody}/{pattern}"])
    with pytest.raises(ConfigError, match=rf"no permission to read the folder {as_somebody}/b"):
        files_below(str(as_somebody), (".jsonl",))


def test_a_folder_that_a_pattern_does_not_name_may_be_closed(as_somebody: Path) -> None:
    close(as_somebody / "other")
    assert len(find_files([f"{as_somebody}/[ab]/x.jsonl"])) == 2


@pytest.mark.parametrize("pattern", ["*/x.jsonl", "b/x.jsonl"])
def test_a_file_that_may_not_be_read_is_refused_by_name(as_somebody: Path, pattern: str) -> None:
    close(as_somebody / "b" / "x.jsonl")
    with pytest.raises(ConfigError, match=rf"no permission to read {as_somebody}/b/x\.jsonl"):
        find_files([f"{as_somebody}/{pattern}"])


def test_links_to_folders_are_followed_and_a_file_counts_once(tmp_path: Path) -> None:
    folder = made(tmp_path / "data", "v2/a.jsonl")
    made(tmp_path / "far", "b.jsonl")
    (folder / "latest").symlink_to("v2")
    (folder / "linked").symlink_to(tmp_path / "far")
    (folder / "v2" / "up").symlink_to("..")
    for listing in (files_matching(f"{folder}/**/*.jsonl"), files_below(str(folder), (".jsonl",))):
        assert within(folder, listing.files) == ["linked/b.jsonl", "v2/a.jsonl"]
        assert within(folder, listing.skipped["links to files listed already"]) == ["latest/a.jsonl"]
    assert within(folder, files_matching(f"{folder}/l*/*.jsonl").files) == ["latest/a.jsonl", "linked/b.jsonl"]


def test_a_link_to_nothing_is_refused(tmp_path: Path) -> None:
    made(tmp_path, "a.jsonl")
    (tmp_path / "b.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(ConfigError, match=r"b\.jsonl is a broken link to gone\.jsonl"):
        files_matching(f"{tmp_path}/*.jsonl")


def test_what_is_left_out_is_told_with_its_number_and_the_first_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(tmp_path, "a.jsonl", "B.JSONL", "c.JSONL", "folder.jsonl/d.jsonl")
    os.mkfifo(tmp_path / "pipe.jsonl")
    with caplog.at_level(logging.WARNING):
        assert [Path(file.name).name for file in find_files([f"{tmp_path}/*.jsonl"], logs_skipped=True)] == ["a.jsonl"]
    told = {record.message: record.__dict__["fields"] for record in caplog.records}
    assert {text.split(": ")[1].split(",")[0]: fields["count"] for text, fields in told.items()} == {
        "names that match only in another case": 2,
        "folders (FOLDER/* names their files)": 1,
        "pipes": 1,
    }
    assert told["skipped in the data: names that match only in another case"]["first"] == f"{tmp_path}/B.JSONL"


def test_a_folder_takes_endings_in_any_case_and_tells_the_others(tmp_path: Path) -> None:
    made(tmp_path, "a.jsonl", "B.JSONL.GZ", "notes.md", ".hidden/c.jsonl")
    listing = files_below(str(tmp_path), (".jsonl", ".jsonl.gz"))
    assert within(tmp_path, listing.files) == ["B.JSONL.GZ", "a.jsonl"]
    skipped = {reason: within(tmp_path, names) for reason, names in listing.skipped.items()}
    assert skipped == {"files with other endings": ["notes.md"], "hidden names": [".hidden"]}


def test_brackets_in_the_name_of_a_folder_are_taken_literally(tmp_path: Path) -> None:
    made(tmp_path, "set [v1]/a.bin", "set [v1]/b[2].bin", "set v/c.bin")
    found = files_matching(f"{tmp_path}/set [v1]/*.bin").files
    assert within(tmp_path, found) == ["set [v1]/a.bin", "set [v1]/b[2].bin"]
    named = f"{tmp_path}/set [v1]/b[2].bin"
    assert TokenStorage(named, 0.0).matches(named) == [named]


def test_a_pattern_that_names_folders_alone_says_so(tmp_path: Path) -> None:
    made(tmp_path, "a/b.txt")
    with pytest.raises(ConfigError, match=r"no file matches .*skipped folders .*/a\b"):
        find_files([f"{tmp_path}/*"])


class Elsewhere(fsspec.AbstractFileSystem):
    """A storage with folders, links and failures, as an sftp server has them."""

    protocol = "elsewhere"
    cachable = False
    failures: ClassVar[dict[str, OSError]] = {}
    targets: ClassVar[dict[str, str]] = {"data/newest.jsonl": "data/b/x.jsonl", "data/linked": "far"}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder = str(self._strip_protocol(path))
        if folder in self.failures:
            raise self.failures[folder]
        place = f"{self.targets.get(folder, folder)}/"
        below = [(name.removeprefix(place), kind) for name, kind in STORED.items() if name.startswith(place)]
        kinds = {name.partition("/")[0]: "directory" if "/" in name else kind for name, kind in below}
        return [{"name": f"{folder}/{name}", "size": 1, "type": kind} for name, kind in kinds.items()]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        path = str(self._strip_protocol(path))
        found = self.targets.get(path, path)
        if found in STORED or any(name.startswith(f"{found}/") for name in STORED):
            return {"name": path, "size": 1, "type": STORED.get(found, "directory")}
        raise FileNotFoundError(path)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> dict[str, OSError]:
    """What listing a folder of a storage raises."""
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    failures: dict[str, OSError] = {}
    monkeypatch.setattr(Elsewhere, "failures", failures)
    return failures


@pytest.mark.parametrize("error", [PermissionError("denied"), FileNotFoundError("gone")])
@pytest.mark.parametrize("path", ["data/*/x.jsonl", "data/**/*.jsonl", "data/b/*.jsonl", "data"])
def test_a_folder_elsewhere_that_cannot_be_listed_is_refused_by_name(
    elsewhere: dict[str, OSError], path: str, error: OSError
) -> None:
    elsewhere["data/b"] = error
    with pytest.raises(ConfigError, match=r"elsewhere://data/b\b"):
        Files().find([f"elsewhere://{path}"], in_folders=(".jsonl",))


def test_a_folder_elsewhere_that_a_pattern_does_not_name_may_be_closed(elsewhere: dict[str, OSError]) -> None:
    elsewhere["data/b/deep"] = PermissionError("denied")
    assert len(find_files(["elsewhere://data/[ab]/x.jsonl"])) == 2


@pytest.mark.usefixtures("elsewhere")
def test_what_is_left_out_elsewhere_is_told(caplog: pytest.LogCaptureFixture) -> None:
    other_case, links = "names that match only in another case", "links to folders (followed on this machine only)"
    for path, found, skipped in [
        ("data/*", ["newest.jsonl"], {"folders (FOLDER/* names their files)": 3}),
        ("data/b/*.jsonl", ["x.jsonl"], {other_case: 1}),
        ("data/*/*.jsonl", ["x.jsonl", "x.jsonl"], {other_case: 1, links: 1}),
        ("data/linked/*.jsonl", ["w.jsonl"], {}),
        ("data/**/*.jsonl", ["x.jsonl", "x.jsonl", "z.jsonl", "newest.jsonl"], {other_case: 1, links: 1}),
        ("data", ["x.jsonl", "Y.JSONL", "x.jsonl", "z.jsonl", "newest.jsonl"], {links: 1}),
    ]:
        caplog.clear()
        files = Files().find([f"elsewhere://{path}"], in_folders=(".jsonl",), logs_skipped=True)
        assert sorted(Path(file.name).name for file in files) == sorted(found), path
        said = {record.message.partition(": ")[2]: record.__dict__["fields"]["count"] for record in caplog.records}
        assert said == skipped, path


@pytest.mark.usefixtures("elsewhere")
def test_a_set_elsewhere_is_found_by_the_same_pattern() -> None:
    storage = TokenStorage("elsewhere://data/b/*.jsonl", 0.0)
    assert storage.matches(storage.root) == ["data/b/x.jsonl"]


ROW = b'{"text": "a"}\n'
BUCKET = {"a.jsonl": ROW, "B.JSONL": ROW, "c.jsonl": b"", "d.jsonl/e.jsonl": ROW, "d.jsonl/f.jsonl": b"", "g.md": ROW}
OTHER_CASE, FOLDERS = "names that match only in another case", "folders (FOLDER/* names their files)"
OTHER_ENDINGS, EMPTY = "files with other endings", "files of 0 bytes"


@pytest.fixture
def bucket() -> Iterator[Any]:
    """An object store with `BUCKET` in it, called memory://bucket."""
    system = fsspec.filesystem("memory")
    for name, content in BUCKET.items():
        system.pipe_file(f"/bucket/{name}", content)
    yield system
    system.rm("/bucket", recursive=True)


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[str]:
    """A web server that lists `BUCKET`, with links to other orders of the list, and the URL of its folder."""

    class Pages(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

        def list_directory(self, path: Any) -> Any:
            rows = [f'<a href="{one.name}{"/" * one.is_dir()}">' for one in Path(path).iterdir()]
            (tmp_path / "page").write_text("".join(['<a href="?C=N;O=D">', '<a href="../">', *rows]))
            self.send_response(200)
            self.send_header("Content-Length", str((tmp_path / "page").stat().st_size))
            self.end_headers()
            return (tmp_path / "page").open("rb")

    for name, content in BUCKET.items():
        (tmp_path / "bucket" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "bucket" / name).write_bytes(content)
    with HTTPServer(("127.0.0.1", 0), partial(Pages, directory=tmp_path)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/bucket"
        server.shutdown()


def told(records: pytest.LogCaptureFixture) -> dict[str, tuple[int, str]]:
    """What was said to be left out: for each reason how many, and the name of the first one."""
    said = {record.message: record.__dict__["fields"] for record in records.records}
    return {text.partition(": ")[2]: (of["count"], of["first"].rpartition("/")[2]) for text, of in said.items()}


@pytest.mark.parametrize("place", ["bucket", "pages"])
def test_glob_of_a_store_or_a_server_leaves_out_nothing_in_silence(
    place: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """A pattern, the same for `data prepare`, and a folder."""
    found = request.getfixturevalue(place)
    url = "memory://bucket" if place == "bucket" else found
    source = JsonlSource(type="jsonl", paths=(f"{url}/*",))
    assert [Path(name).name for name, *_ in source_identity(source, 0)[1]] == ["B.JSONL", "a.jsonl", "c.jsonl", "g.md"]
    assert told(caplog) == {FOLDERS: (1, "d.jsonl"), EMPTY: (1, "c.jsonl")}
    caplog.clear()
    plan = make_plan([f"{url}/*.jsonl"], "byte", ByteTokenizer(), PrepareOptions(), Files())
    assert [Path(origin.name).name for origin in plan.origins] == ["a.jsonl", "c.jsonl"]
    assert told(caplog) == {OTHER_CASE: (1, "B.JSONL"), FOLDERS: (1, "d.jsonl"), EMPTY: (1, "c.jsonl")}
    if place == "bucket":  # nothing tells a folder of a server from a file
        caplog.clear()
        plan = make_plan([url], "byte", ByteTokenizer(), PrepareOptions(), Files())
        assert [Path(one.name).name for one in plan.origins] == ["B.JSONL", "a.jsonl", "c.jsonl", "e.jsonl", "f.jsonl"]
        assert told(caplog) == {OTHER_ENDINGS: (1, "g.md"), EMPTY: (2, "c.jsonl")}


def test_object_of_a_store_that_may_not_be_read_is_refused_by_name(
    bucket: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = bucket.open

    def refuse(asked: str, *arguments: Any, **options: Any) -> Any:
        if asked == "/bucket/a.jsonl":
            raise PermissionError(f"no access to {asked}")
        return read(asked, *arguments, **options)

    monkeypatch.setattr(bucket, "open", refuse)
    with pytest.raises(ConfigError, match=r": memory:///bucket/a\.jsonl: the storage refuses this node's credentials"):
        list(documents(JsonlSource(type="jsonl", paths=("memory://bucket/**/*.jsonl",)), 0))


def test_object_without_a_byte_that_is_named_alone_is_told(bucket: Any, caplog: pytest.LogCaptureFixture) -> None:
    source_identity(JsonlSource(type="jsonl", paths=("memory://bucket/a.jsonl", "memory://bucket/c.jsonl")), 0)
    assert told(caplog) == {EMPTY: (1, "c.jsonl")}
