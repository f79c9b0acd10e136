"""Who is told of a node: what the labels of its build say."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from pathlib import Path

import pytest

from zeroband.config import load_config
from zeroband.config.shared import shared_digest
from zeroband.observe.prometheus import MetricsServer
from zeroband.runtime.report import commit_of, open_watchers


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone of one commit."""
    if shutil.which("git") is None:
        pytest.skip("needs git")
    (tmp_path / "clone").mkdir()
    (tmp_path / "clone" / "file").write_text("1\n")
    who = ("-c", "user.name=n", "-c", "user.email=n@example")
    for command in (("init", "-q"), ("add", "file"), (*who, "commit", "-q", "-m", "file: begin")):
        subprocess.run(["git", *command], cwd=tmp_path / "clone", check=True)
    return tmp_path / "clone"


def test_commit_of_a_clone_is_known_and_whether_files_were_changed(clone: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True, check=True).stdout
    subprocess.run(["git", "tag", "v1"], cwd=clone, check=True)  # names no other than the commit
    assert commit_of(clone) == head[:12]
    (clone / "file").write_text("2\n")
    assert commit_of(clone) == f"{head[:12]}-dirty"


def test_commit_is_unknown_where_the_package_lies_in_no_clone_of_its_own(clone: Path, tmp_path: Path) -> None:
    (clone / "site-packages").mkdir()
    assert commit_of(clone / "site-packages") == "unknown"  # installed in another project's clone
    (tmp_path / "broken" / ".git").mkdir(parents=True)
    assert commit_of(tmp_path / "broken") == "unknown"


def test_exporter_of_a_node_says_what_the_nodes_of_its_run_share(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client", reason="needs the extra prometheus")
    flags = [f"--run.dir={tmp_path}", "--observe.prometheus.port=0"]
    config = load_config(flags, {})
    node_dir = tmp_path / "default" / "n0"
    node_dir.mkdir(parents=True)
    (node_dir / "events.jsonl").write_text('{"kind": "left", "at_s": 1.0, "reason": "done"}\n')
    (server,) = open_watchers(config, "n0", node_dir)
    assert isinstance(server, MetricsServer)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert f'config_hash="{shared_digest(config)[:12]}"' in text
    assert shared_digest(load_config([*flags, "--node.id=other"], {})) == shared_digest(config)
