"""What the trainer's report makes of steps and rounds, read back from the node's files."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zeroband.config import load_config
from zeroband.config.model import LlamaConfig
from zeroband.config.shared import shared_digest
from zeroband.elastic.membership.progress import Progress
from zeroband.elastic.rounds.round_report import RoundReport
from zeroband.errors import ConfigError
from zeroband.model.blueprint import LlamaBlueprint
from zeroband.node.async_copy import PendingNumbers
from zeroband.node.gpus import Card
from zeroband.observe.events import EVENTS_FILE
from zeroband.observe.metrics import METRICS_FILE
from zeroband.observe.prometheus import MetricsServer
from zeroband.runtime.report import InnerStep, PassResult, SourceResult, TrainerReport, commit_of, open_watchers

PASSED = PassResult(torch.tensor([20.0]), tokens=10, data_s=0.0, data_pass=0)
MADE = InnerStep(number=0, lr=1e-3, passed=PASSED, pending=PendingNumbers(torch.zeros(2)), grad_norm=1.0, loss=2.0)


@pytest.fixture
def node(tmp_path: Path) -> Any:
    return SimpleNamespace(
        config=load_config((), {}),
        node_id="a",
        node_dir=tmp_path,
        local=SimpleNamespace(world_size=1, device=torch.device("cpu"), cards=()),
        tokenizer=SimpleNamespace(padded_vocab_size=256),
        loader=SimpleNamespace(data_pass=0),
        model=LlamaBlueprint(LlamaConfig(d_model=8, n_layers=1, n_heads=1), 64).on_meta(),
    )


def after(tokens: int) -> Progress:
    return replace(Progress.at_start(), tokens=tokens)


def round_after(progress: Progress, uncommitted_tokens: int) -> RoundReport:
    times = {"wait_s": 0.0, "transfer_s": 0.0, "apply_s": 0.0, "sent_bytes": 0, "received_bytes": 0}
    own = {"member_id": "a#1", "members": ("a#1",), "weights": (10,), "samples": (1,), "late": (), "failures": ()}
    kept: Any = {**times, **own, "uncommitted_tokens": uncommitted_tokens}
    return RoundReport(round=1, epoch=1, state_digest="", progress=progress, is_left_out=False, **kept)


def metrics_of(node: Any, *steps: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lines of the metrics after these steps: what each of them has that is another than in MADE."""
    report = TrainerReport(node)
    for number, changes in enumerate(steps):
        report.step_done(replace(MADE, number=number, ended_at_s=number + 1.0, **changes))
    report.run_finished()
    report.close()
    return relay_routes(node, METRICS_FILE)


def relay_routes(node: Any, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (node.node_dir / file).read_text().splitlines()]


def committed(progress: Progress, *synced: RoundReport) -> dict[str, Any]:
    return {"progress": progress, "is_commit": True, "synced": synced}


def test_tokens_of_the_run_include_what_was_learned_while_a_round_travelled(node: Any) -> None:
    arrival = committed(after(40), round_after(after(40), uncommitted_tokens=10))
    lines = metrics_of(node, {}, {}, arrival, {"progress": after(40)})
    assert [line["train/tokens"] for line in lines] == [10, 20, 50, 60]


def test_scored_payloads_are_told_of_with_the_round_that_they_were_sent_in(node: Any) -> None:
    scored = replace(round_after(after(40), 0), round=5, gains=(("a#1", 0.25), ("b#2", -1.0)), score_s=0.5)
    (line,) = metrics_of(node, committed(after(40), scored))
    assert (line["outer/gain"], line["outer/score_s"]) == (0.25, 0.5)
    scores = [event for event in relay_routes(node, EVENTS_FILE) if event["kind"] == "payload_scored"]
    told = [(score["round"], score["member_id"], score["gain"]) for score in scores]
    assert told == [(4, "a#1", 0.25), (4, "b#2", -1.0)]


def test_member_that_left_as_it_was_asked_to_is_not_lost(node: Any) -> None:
    both = {"members": ("a#1", "b#2", "c#3"), "weights": (10, 10, 10), "samples": (1, 1, 1)}
    last = replace(round_after(after(30), 0), leaving=("b#2",), **both)
    alone = replace(round_after(after(40), 0), round=2, epoch=2)
    metrics_of(node, committed(after(30), last), committed(after(40), alone))
    lost = [event["member_ids"] for event in relay_routes(node, EVENTS_FILE) if event["kind"] == "peer_lost"]
    assert lost == [["c#3"]]


def test_mfu_is_of_all_cards_of_the_node_each_once_whatever_a_rank_sees(node: Any) -> None:
    node.local.cards = (
        Card("NVIDIA L4", "a", "1", 24),
        Card("NVIDIA L4", "a", "1", 24),
        Card("NVIDIA H100", "b", "2", 80),
    )
    lines = metrics_of(node, *[committed(after(10))] * 2)
    flops = lines[-1]["train/tokens_per_s"] * node.model.flops_per_token(node.config.data.seq_length)
    assert lines[-1]["train/mfu"] == pytest.approx(flops / ((121 + 989) * 1e12))


def test_tokens_of_a_node_that_trains_alone_are_counted_once(node: Any) -> None:
    assert [line["train/tokens"] for line in metrics_of(node, {}, committed(after(20)))] == [10, 20]


def test_sources_are_told_of_step_by_step_and_their_passes_at_the_end(node: Any) -> None:
    told = metrics_of(
        node,
        {"sources": {"web": SourceResult(8, 0.5, loss=2.5), "code": SourceResult(0, 1.25)}},
        {"sources": {"web": SourceResult(8, 0.75, loss=float("nan")), "code": SourceResult(2, 1.5, loss=1.0)}},
    )
    names = [f"{kind}/{source}" for source in ("web", "code") for kind in ("train/loss", "data/tokens", "data/pass")]
    assert [[line.get(name) for name in names] for line in told] == [
        [2.5, 8, 0.5, None, None, 1.25],
        ["nan", 8, 0.75, 1.0, 2, 1.5],
    ]
    finished = relay_routes(node, EVENTS_FILE)[-1]
    assert (finished["kind"], finished["data_pass_web"], finished["data_pass_code"]) == ("run_finished", 0.75, 1.5)


WITH_OTHERS = ("--outer.type=diloco", "--store.url=redis://localhost", "--observe.publish=false", "--fault.detect_s=3")


@pytest.mark.parametrize(("arguments", "detect_s"), [((), None), (WITH_OTHERS, 3.0)], ids=["alone", "with others"])
def test_node_that_trains_with_others_tells_how_soon_it_notices_a_loss(
    node: Any, arguments: Sequence[str], detect_s: float | None
) -> None:
    node.config = load_config(arguments, {})
    report = TrainerReport(node)
    report.started()
    report.close()
    (started,) = relay_routes(node, EVENTS_FILE)
    assert (started["kind"], started.get("detect_s")) == ("node_started", detect_s)


@pytest.mark.slow
def test_folder_that_was_removed_and_taken_by_another_trainer_is_not_written_to(node: Any, tmp_path: Path) -> None:
    node.node_dir = tmp_path / "a"
    report = TrainerReport(node)
    shutil.rmtree(node.node_dir)
    node.node_dir.mkdir()
    other = os.open(node.node_dir, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    try:
        with pytest.raises(ConfigError, match=r"node 'a' of run.id=.* already"):
            report.record(1, {}, ())
        assert list(node.node_dir.iterdir()) == []
    finally:
        os.close(other)
        report.close()


# -- who is told of a node: what the labels of its build say ---------------------------------------------------------


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
