"""The hf:// paths of the presets, through huggingface_hub, from a hub of a few lines on this machine."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import io
import json
import logging
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, unquote

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from tests.servers import until
from tests.unit.data.prepared import config_of, drawn_ids, fetched_blocks, opened, spans_of, stored, write_set

from zeroband.config import load_config
from zeroband.config.data import DataConfig
from zeroband.data.sources import documents, source_identity
from zeroband.errors import ConfigError, StorageLost

constants = pytest.importorskip("huggingface_hub.constants", reason="needs the extra hf")

Files = dict[str, bytes]
REPOSITORY = r"([^/]+/[^/]+)"


def _parquet(*texts: str) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), out)
    return out.getvalue()


def _jsonl(text: str) -> bytes:
    return gzip.compress(json.dumps({"text": text}).encode(), mtime=0)


class _Hub(BaseHTTPRequestHandler):
    """Says which repositories and files there are, and gives ranges of the files, if it does not refuse."""

    files: Files
    refusals: list[int]
    """Status codes that the next requests for parts of files are answered with."""

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if asked := re.fullmatch(rf"/datasets/{REPOSITORY}/resolve/main/(.+)", path):
            self._send_range(self.files.get(f"{asked[1]}/{asked[2]}"))
        elif asked := re.fullmatch(rf"/api/datasets/{REPOSITORY}/tree/main/?(.*)", path):
            self._send(json.dumps(self._listing("/".join(filter(None, asked.groups())) + "/")).encode())
        elif asked := re.fullmatch(rf"/api/datasets/{REPOSITORY}(/revision/main)?", path):
            self._send(json.dumps({"id": asked[1], "sha": "0" * 40, "siblings": [], "tags": []}).encode())
        else:
            self._send(b"{}", 404)

    def do_POST(self) -> None:
        """Which of some paths there are."""
        asked = re.fullmatch(rf"/api/datasets/{REPOSITORY}/paths-info/main", unquote(self.path))
        sent = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if asked:
            files = {f"{asked[1]}/{path.strip('/')}" for path in sent["paths"]}
            found = [self._entry(path) for path in files & self.files.keys()]
            self._send(json.dumps(found).encode())
        else:
            self._send(b"{}", 404)

    def _listing(self, folder: str) -> list[dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        for path in self.files:
            name, slash, _ = path.removeprefix(folder).partition("/")
            if path.startswith(folder):
                found[name] = self._entry(folder + name) | ({"type": "directory"} if slash else {})
        return list(found.values())

    def _entry(self, path: str) -> dict[str, object]:
        content = self.files.get(path, b"")
        of_file = {"type": "file", "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        return {"path": path.split("/", 2)[2], **of_file}

    def _send_range(self, content: bytes | None) -> None:
        if content is None or self.refusals:
            self._send(b"{}", 404 if content is None else self.refusals.pop())
            return
        first, last = re.findall(r"\d+", self.headers["Range"])
        self._send(content[int(first) : int(last) + 1], 206)

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def refusals() -> list[int]:
    return []


class HubServer:
    """A hub at one address, which may be out of reach for a while."""

    def __init__(self, handler: type[_Hub]) -> None:
        self._handler, self.files = handler, handler.files
        self._address = ("127.0.0.1", 0)
        self.come_back()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._address[1]}"

    def come_back(self) -> None:
        self._server = ThreadingHTTPServer(self._address, self._handler)
        self._address = ("127.0.0.1", self._server.server_port)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def go_away(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def hub(hub_server: HubServer) -> Files:
    """The files of a hub, by repository and path."""
    return hub_server.files


@pytest.fixture
def hub_server(refusals: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    c4, edu = "allenai/c4/en/c4-train.{}-of-01024.json.gz", "HuggingFaceFW/fineweb-edu/sample/10BT/{}.parquet"
    files = {c4.format(f"{number:05}"): _jsonl(f"c4 {number}") for number in range(6)}
    files |= {edu.format(f"00{number}_00000"): _parquet(f"edu {number}", "end") for number in range(2)}
    handler = type("Hub", (_Hub,), {"files": files, "refusals": refusals})
    server = HubServer(handler)
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.go_away()


def data_of(preset: str, tmp_path: Path) -> DataConfig:
    return load_config([f"@{preset}", "--outer", "none", f"--data.cache_dir={tmp_path}"], {}).data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "texts"),
    [("150M", ["c4 0", "c4 1", "c4 2", "c4 3"]), ("1B", ["edu 0", "end"]), ("10B", ["edu 0", "end"])],
)
def test_preset_reads_its_few_files_of_the_hub(preset: str, texts: list[str], hub: Files, tmp_path: Path) -> None:
    assert [document.text for document in documents(data_of(preset, tmp_path).source, seed=0)] == texts


@pytest.mark.slow
def test_file_of_the_hub_that_changes_at_equal_size_is_another(hub: Files, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    source = data_of("150M", tmp_path).source
    before = source_identity(source, seed=0)
    name = next(iter(hub))
    hub[name] = hub[name][:-1] + b"\1"
    fsspec.filesystem("hf").invalidate_cache()
    assert source_identity(source, seed=0) != before


@pytest.mark.slow
def test_set_on_the_hub_is_read_through_refusals_and_what_is_not_there_is_named(
    hub: Files, refusals: list[int], tmp_path: Path
) -> None:
    whole = drawn_ids(1000)
    write_set(tmp_path / "set", [whole[:600], whole[600:]])
    hub |= {f"ours/sets/a/{path.name}": path.read_bytes() for path in (tmp_path / "set").iterdir()}
    refusals.append(503)
    with stored(config_of("hf://datasets/ours/sets/a", tmp_path / "cache")) as store:
        assert not refusals
        refusals.append(429)
        for start, stop in spans_of(600):
            np.testing.assert_array_equal(store.read(start, stop), whole[start:stop])
        assert not refusals and len(fetched_blocks(tmp_path / "cache")) == 10
        del hub["ours/sets/a/part-1.npy"]
        with pytest.raises(StorageLost, match=r"^hf://datasets/ours/sets/a/part-1\.npy does not exist"):
            store.read(600, 601)
    with pytest.raises(ConfigError, match=r"hf://datasets/ours/sets/b/manifest\.json does not exist"):
        opened(config_of("hf://datasets/ours/sets/b", tmp_path / "cache"))


@pytest.mark.slow
def test_hub_that_is_out_of_reach_for_longer_than_its_library_tries_is_waited_for(
    hub_server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = SimpleNamespace(sleep=lambda _: None)  # it would take 23 s
    monkeypatch.setattr(importlib.import_module("huggingface_hub.utils._http"), "time", impatient)
    whole = drawn_ids(1000)
    write_set(tmp_path / "set", [whole])
    hub_server.files.update({f"ours/sets/a/{path.name}": path.read_bytes() for path in (tmp_path / "set").iterdir()})
    caplog.set_level(logging.INFO)
    with (
        stored(config_of("hf://datasets/ours/sets/a", tmp_path / "cache")) as store,
        ThreadPoolExecutor(1) as reader,
    ):
        np.testing.assert_array_equal(store.read(0, 1), whole[:1])
        hub_server.go_away()
        read = reader.submit(store.read, 64, 1000)
        until(lambda: any("data storage is failing" in one.message for one in caplog.records), "word of it")
        assert not read.done()
        hub_server.come_back()
        np.testing.assert_array_equal(read.result(60), whole[64:])
    assert [one.message for one in caplog.records if "storage" in one.message][-1].endswith("has recovered")
