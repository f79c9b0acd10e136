"""The hf:// paths of the presets, through huggingface_hub, from a hub of a few lines on this machine."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow
import pyarrow.parquet
import pytest

from zeroband.config import load_config
from zeroband.config.data import DataConfig
from zeroband.data.sources import documents, source_identity
from zeroband.errors import ConfigError

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
    """Says which repositories and files there are, and gives ranges of the files."""

    files: Files

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        if asked := re.fullmatch(rf"/datasets/{REPOSITORY}/resolve/main/(.+)", path):
            self._send_range(self.files[f"{asked[1]}/{asked[2]}"])
        elif asked := re.fullmatch(rf"/api/datasets/{REPOSITORY}/tree/main/?(.*)", path):
            self._send(json.dumps(self._listing("/".join(filter(None, asked.groups())) + "/")).encode())
        elif asked := re.fullmatch(rf"/api/datasets/{REPOSITORY}(/revision/main)?", path):
            self._send(json.dumps({"id": asked[1], "sha": "0" * 40, "siblings": [], "tags": []}).encode())
        else:
            self._send(b"{}", 404)

    def _listing(self, folder: str) -> list[dict[str, object]]:
        found: dict[str, dict[str, object]] = {}
        repository = len("/".join(folder.split("/")[:2])) + 1
        for path, content in self.files.items():
            name, slash, _ = path.removeprefix(folder).partition("/")
            here = {"path": (folder + name)[repository:], "oid": hashlib.sha1(content).hexdigest()}
            if path.startswith(folder):
                found[name] = here | ({"type": "directory"} if slash else {"type": "file", "size": len(content)})
        return list(found.values())

    def _send_range(self, content: bytes) -> None:
        first, last = re.findall(r"\d+", self.headers["Range"])
        self._send(content[int(first) : int(last) + 1], 206)

    def _send(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Files]:
    """The files of a hub, by repository and path."""
    c4, edu = "allenai/c4/en/c4-train.{}-of-01024.json.gz", "HuggingFaceFW/fineweb-edu/sample/10BT/{}.parquet"
    files = {c4.format(f"{number:05}"): _jsonl(f"c4 {number}") for number in range(6)}
    files |= {edu.format(f"00{number}_00000"): _parquet(f"edu {number}", "end") for number in range(2)}
    handler = type("Hub", (_Hub,), {"files": files})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield files
        server.shutdown()


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
def test_hub_out_of_reach_is_an_error_of_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"data\.source\.paths: cannot list 'hf://datasets/allenai/c4/"):
        next(documents(data_of("150M", tmp_path).source, seed=0))
