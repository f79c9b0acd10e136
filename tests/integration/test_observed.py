"""What a user finds after a run: two uneven nodes with everything switched on, seen through the files they left."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.tiny_runs import ForkedCluster

import zeroband
import zeroband.cli
from zeroband.checkpoint.loading import open_checkpoint, steps_in_order
from zeroband.checkpoint.storage import open_storage
from zeroband.config import load_config
from zeroband.elastic.store.facts import StoreFacts
from zeroband.kernels.codec import CODECS
from zeroband.observe.events import EVENTS
from zeroband.observe.facts import FolderFacts
from zeroband.observe.metrics import METRICS, metric_of
from zeroband.observe.status import RunReader
from zeroband.tools.cluster import RedisServer

ROOT = Path(__file__).resolve().parents[2]
SECRETS = ("t0ken-in-a-flag", "passw0rd-of-the-store")
STEPS, ROUNDS = 6, 2
AUDIT_BYTES = 10_000
"""Of two members, at most: each shows the stretch that either draws, of 4096 values in int8, and says what it found."""
PROMPT = "def answer("
GPU_ONLY = {"train/mfu", "node/gpu_peak_bytes"}
PAYLOADS_ONLY = {"outer/payload_bytes", "outer/payload_ratio", "outer/gain", "outer/score_s"}
SITES_ONLY = {"outer/wide_bytes"}
"""Of algorithms that send payloads of their own."""
FIRST_MEMBER_ONLY = {"ckpt/durable_step"}
BESIDE = {"join_state", "links"}
"""Events beside the story of a node."""
MUON_ONLY = {"train/lr_muon"}

SETTINGS = {
    "model.d_model": 32,
    "model.n_layers": 1,
    "data.seq_length": 32,
    "data.source.type": "text",
    "data.sources": '[{"name": "long", "weight": 2, "source": {"type": "synthetic"}},'
    ' {"name": "short", "weight": 1, "source": {"type": "synthetic", "mean_length": 100}}]',
    "train.total_steps": STEPS,
    "train.batch_size": 8,
    "train.micro_bs": 4,  # one or two micro-batches on each rank
    "train.dtype": "bfloat16",
    "train.profile.steps": [3, 3],  # a step takes seconds to trace
    "outer.inner_steps": STEPS // ROUNDS,
    "outer.robust.type": "clip",
    "comm.sites": "off",
    "comm.lanes": 3,
    "eval.every_steps": STEPS // ROUNDS,
    "eval.batches": 1,  # the profile holds them, and a second of it takes five to write
    "eval.sources": f"schema={ROOT / 'src' / 'zeroband' / 'config' / 'schema.py'}",
    "observe.sample_prompt": PROMPT,
    "observe.sample_tokens": 20,
    "observe.report": "true",
    "observe.wandb.mode": "offline",
    "run.token": SECRETS[0],  # in reach of whoever lists processes, but in no file
}
BROKEN_WANDB = 'raise RuntimeError("this wandb is broken")\n'


@dataclass(frozen=True)
class Observed:
    """The run: its directory, what each node wrote there, and what the store shows of it."""

    folder: Path
    store_url: str
    codes: Mapping[str, int]
    metrics: Mapping[str, list[dict[str, Any]]]
    events: Mapping[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def run(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    folder = tmp_path_factory.mktemp("observed")
    (folder / "broken").mkdir()
    (folder / "broken" / "wandb.py").write_text(BROKEN_WANDB)
    flags = [f"--{key}={value}" for key, value in SETTINGS.items()]
    flags += [f"--data.cache_dir={folder / 'cache'}", f"--ckpt.path={folder / 'checkpoints'}"]
    store_url = redis_server.url.replace("unix://", f"unix://default:{SECRETS[1]}@")  # it takes any password
    preset = f"@{ROOT / 'configs' / 'debug' / 'diloco.toml'}"
    with ForkedCluster(folder / "runs", [preset, *flags], nodes=2, store_url=store_url) as cluster:
        path = cluster.environment("node1", 1)["PYTHONPATH"]
        cluster.start(ranks=2)
        cluster.start(ranks=1, env={"PYTHONPATH": f"{folder / 'broken'}:{path}"})
        codes = cluster.wait(timeout_s=240)
        assert set(codes.values()) == {0}, cluster.describe()
        yield Observed(
            cluster.run_dir,
            store_url,
            codes,
            {name: node.metrics() for name, node in cluster.nodes.items()},
            {name: node.events() for name, node in cluster.nodes.items()},
        )


# -- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nodes_write_one_checkpoint_together_and_it_holds_the_last_state(run: Observed) -> None:
    storage = open_storage(str(run.folder.parent.parent / "checkpoints"), run.folder.name)
    checkpoint = open_checkpoint(storage, steps_in_order(storage)[0])
    checkpoint.verify()
    stamp = checkpoint.manifest.stamp
    assert (stamp.round, stamp.inner_step, stamp.members) == (ROUNDS, STEPS, ("node0", "node1"))
    assert checkpoint.manifest.nodes == ("node0", "node1")
    last = [event for event in run.events["node0"] if event["kind"] == "round_committed"][-1]
    assert (stamp.state_digest, stamp.record["progress"]) == (last["digest"], last["progress"])
    kinds = {
        name: [e["kind"] for e in events if e["kind"].startswith("checkpoint")] for name, events in run.events.items()
    }
    assert kinds == {
        "node0": ["checkpoint_staged", "checkpoint_committed"] * ROUNDS,
        "node1": ["checkpoint_staged", "checkpoint_share_written"] * ROUNDS,
    }


# -- metrics and events ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_measures_every_metric_of_the_table_and_no_other(run: Observed) -> None:
    for records in run.metrics.values():
        measured = {metric_of(name) for record in records for name in record} - {"step", "at_s"}
        assert measured <= METRICS.keys()
        elsewhere = GPU_ONLY | PAYLOADS_ONLY | SITES_ONLY | FIRST_MEMBER_ONLY | MUON_ONLY
        assert METRICS.keys() - measured <= elsewhere


@pytest.mark.slow
def test_every_number_is_plausible(run: Observed) -> None:
    for records in run.metrics.values():
        assert [record["step"] for record in records] == list(range(1, STEPS + 1))
        for record in records:
            numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
            assert all(math.isfinite(value) and value >= 0 for value in numbers.values()), numbers
            assert record["train/perplexity"] == pytest.approx(math.exp(record["train/loss"]))
            assert 0 <= record["train/data_s"] < record["train/step_s"]
        for record in records[2::3]:
            assert (
                record["outer/wait_s"] + record["outer/transfer_s"] + record["outer/apply_s"] < record["train/step_s"]
            )
            as_int8 = record["outer/ddp_bytes"] / CODECS["int8"].ratio * ROUNDS / STEPS
            assert as_int8 <= record["outer/sent_bytes"] < 1.01 * as_int8 + AUDIT_BYTES


@pytest.mark.slow
def test_tokens_of_the_run_are_those_that_the_nodes_contributed(run: Observed) -> None:
    weights = [record["outer/weight"] for records in run.metrics.values() for record in records[2::3]]
    assert len(weights) == 2 * ROUNDS
    assert {records[-1]["train/tokens"] for records in run.metrics.values()} == {sum(weights)}
    for records in run.metrics.values():
        assert records[-1]["data/next"] == 2 * STEPS * 8
        assert records[-1]["data/returned_samples"] == 0


@pytest.mark.slow
def test_nodes_with_unequal_ranks_hold_the_same_state_after_every_round(run: Observed) -> None:
    digests = [
        [event["digest"] for event in events if event["kind"] == "round_committed"] for events in run.events.values()
    ]
    assert digests[0] == digests[1]
    assert len(set(digests[0])) == ROUNDS + 1  # and the founding


@pytest.mark.slow
def test_nodes_with_unequal_ranks_get_the_same_held_out_losses(run: Observed) -> None:
    two_ranks, one_rank = (
        [{k: v for k, v in record.items() if k.startswith("eval/")} for record in records if "eval/step" in record]
        for records in run.metrics.values()
    )
    assert [record["eval/step"] for record in one_rank] == [STEPS // ROUNDS * n for n in range(1, ROUNDS + 1)]
    for ours, theirs in zip(two_ranks, one_rank, strict=True):
        for tokens in ("eval/tokens", "eval/tokens/schema"):
            assert ours[tokens] == theirs[tokens] > 0
        for loss in ("eval/loss", "eval/loss/schema", "eval/bits_per_byte", "eval/bits_per_byte/schema"):
            assert ours[loss] == pytest.approx(theirs[loss], rel=1e-3)
            assert one_rank[0][loss] != one_rank[-1][loss]


@pytest.mark.slow
def test_events_tell_the_story_of_a_node(run: Observed) -> None:
    for node_id, events in run.events.items():
        kinds = [e["kind"] for e in events if e["kind"] not in BESIDE and not e["kind"].startswith("checkpoint")]
        rounds = ["round_committed", *["evaluated", "round_committed"] * ROUNDS]
        assert sorted(kinds[3:-3]) == sorted(rounds)  # an evaluation is told of before the step that it follows
        assert [*kinds[:3], *kinds[-3:]] == [
            *("node_started", "joined", "epoch_changed", "sample_written", "run_finished", "left"),
        ]
        told = {event["kind"]: event for event in events}
        assert told["node_started"]["detect_s"] == 5.0 and told["sample_written"]["text"].startswith(PROMPT)
        (joined,) = (event for event in events if event["kind"] == "joined")
        assert joined["member_id"].startswith(f"{node_id}#")
        states = [event["state"] for event in events if event["kind"] == "join_state"]
        assert (states[0], *states[-2:]) == ("wait_old_lease", "founding", "member")


def test_every_name_of_the_tables_is_written_somewhere() -> None:
    package = Path(zeroband.__file__).parent
    tables = {package / "observe" / "metrics.py", package / "observe" / "events.py"}
    sources = "".join(path.read_text(encoding="utf-8") for path in package.rglob("*.py") if path not in tables)
    assert sorted(name for name in {*METRICS, *EVENTS} if f'"{name}"' not in sources) == []


# -- the run directory ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resolved_configuration_loads_back(run: Observed) -> None:
    for node_id in run.metrics:
        config = load_config(
            [f"@{run.folder / node_id / 'config.toml'}"], {"ZERO_BAND_STORE__URL": "redis://localhost"}
        )
        assert (config.node.id, config.train.total_steps, config.train.dtype) == (node_id, STEPS, "bfloat16")
        assert config.run.token is None  # secrets are given anew


@pytest.mark.slow
def test_no_file_holds_a_secret(run: Observed) -> None:
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    leaks = [(path.name, secret) for path in files for secret in SECRETS if secret.encode() in path.read_bytes()]
    assert leaks == []


@pytest.mark.slow
def test_console_is_of_the_first_rank_and_each_rank_has_a_file(run: Observed) -> None:
    console = (run.folder / "node0" / "console.log").read_text()
    assert "local_rank=0" in console and "local_rank=1" not in console
    assert (run.folder / "node0" / "rank1.log").exists()
    assert f"step {STEPS}/{STEPS} loss=" in (run.folder / "node0" / "rank0.log").read_text()


@pytest.mark.slow
def test_sample_continues_the_prompt(run: Observed) -> None:
    for node_id in run.metrics:
        sample = (run.folder / node_id / "sample.txt").read_text()
        assert sample.startswith(PROMPT) and len(sample) > len(PROMPT)
    assert (run.folder / "node0" / "sample.txt").read_bytes() == (run.folder / "node1" / "sample.txt").read_bytes()


@pytest.mark.slow
def test_each_rank_traces_the_step_that_was_named(run: Observed) -> None:
    files = sorted(run.folder.rglob("profile-rank*-step3-3.json.gz"))
    assert sorted(file.name.split("-")[1] for file in files) == ["rank0", "rank0", "rank1"]
    for file in files:
        names = {event["name"] for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert {name for name in names if name.startswith("inner step")} == {"inner step 3"}


def test_wandb_writes_offline(run: Observed) -> None:
    (written,) = (run.folder / "node0" / "wandb").glob("offline-run-*/run-*.wandb")
    content = written.read_bytes()
    assert b"train/loss" in content and b"outer/digest" in content
    assert "wandb" not in (run.folder / "node0" / "rank0.log").read_text()


@pytest.mark.slow
def test_broken_wandb_is_said_once_and_hurts_nothing(run: Observed) -> None:
    lines = [line for line in (run.folder / "node1" / "rank0.log").read_text().splitlines() if "wandb" in line]
    assert len(lines) == 1
    assert 'continuing without wandb reason="RuntimeError: this wandb is broken"' in lines[0]


@pytest.mark.slow
def test_status_shows_the_finished_run(run: Observed, capsys: pytest.CaptureFixture[str]) -> None:
    assert zeroband.cli.main(["status", str(run.folder)]) == 0
    shown = capsys.readouterr().out
    digest = run.metrics["node0"][-1]["outer/digest"][:12]
    for node_id in run.metrics:
        row = next(line for line in shown.splitlines() if line.startswith(node_id))
        assert f"finished  {STEPS}/{STEPS}" in row and digest in row
    assert "per-step data parallel would have sent" in shown and "DIVERGED" not in shown


@pytest.mark.slow
def test_store_shows_what_the_files_of_the_run_hold(run: Observed) -> None:
    """To the last line: a node that ends waits a moment for it."""
    with closing(StoreFacts(run.store_url, run.folder.name, SECRETS[0])) as facts:
        assert facts.read() == FolderFacts(run.folder).read()
    with closing(StoreFacts(run.store_url, run.folder.name, SECRETS[0])) as facts:
        view = RunReader(facts).read()
    assert view == RunReader(FolderFacts(run.folder)).read()
    assert [(node.state, node.step) for node in view.nodes] == [("finished", STEPS)] * 2


@pytest.mark.slow
def test_nodes_record_their_links(run: Observed) -> None:
    for node_id, events in run.events.items():
        (other,) = run.events.keys() - {node_id}
        first = next(event["links"] for event in events if event["kind"] == "links")
        assert [link["to"].partition("#")[0] for link in first] == [other]
        assert first[0]["rtt_ms"] > 0 and not first[0]["is_cut_off"]


@pytest.mark.slow
def test_report_of_the_run_lies_beside_its_nodes_and_holds_its_figures(run: Observed) -> None:
    report = (run.folder / "report.html").read_text()
    (text,) = re.findall(r'<script type="application/json" id="saved">(.*?)</script>', report)
    state = json.loads(text)["state"]
    last = [records[-1] for records in run.metrics.values()]
    loss = sum(record["train/loss"] for record in last) / len(last)
    assert (state["run"]["loss"], state["run"]["held_out"]) == pytest.approx((loss, last[0]["eval/loss"]))
    assert (state["run"]["step"], state["run"]["total_steps"]) == (STEPS, STEPS)
    assert "node0 finished all 6 steps." in [event["words"] for event in state["events"]]
    assert sum(one["state"] == "good" for one in state["guarantees"]) >= 3  # those that this run kept
    consoles = [(run.folder / name / "console.log").read_text() for name in run.metrics]
    assert sum(f"report      {run.folder / 'report.html'}" in console for console in consoles) >= 1  # the last one's
    assert all(str(run.folder.parent.parent / "checkpoints") in console for console in consoles)


@pytest.mark.slow
def test_status_tells_of_a_divergence_by_its_exit_code(run: Observed, tmp_path: Path) -> None:
    for node_id, events in run.events.items():
        (tmp_path / node_id).mkdir()
        lines = [json.dumps(e | ({"digest": node_id} if e.get("round") == ROUNDS else {})) for e in events]
        (tmp_path / node_id / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert RunReader(FolderFacts(tmp_path)).read().disagreements == (ROUNDS,)
    assert zeroband.cli.main(["status", str(tmp_path)]) == 3
