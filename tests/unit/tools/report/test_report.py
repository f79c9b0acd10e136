"""The report of a run from hand-written facts: what it says, what it hides, and what it needs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.made_runs import BEGIN_S, event, history_of, run_of, step, write

import zeroband.cli
from zeroband.observe.facts import Fact
from zeroband.observe.history import RunHistory
from zeroband.tools.board.document import RunContext
from zeroband.tools.board.saved import saved_page
from zeroband.tools.report.command import write_report
from zeroband.tools.report.record import RunRecord, is_secret
from zeroband.tools.report.sections import saved_data

PASSWORD = "hunter2"
EVIL = '<script>alert("x")</script>'


class Saved:
    """The data in a report, and all texts that it says."""

    def __init__(self, html: str) -> None:
        self.html = html
        (text,) = re.findall(r'<script type="application/json" id="saved">(.*?)</script>', html, re.DOTALL)
        self.data: dict[str, Any] = json.loads(text)
        self.text = "\n".join(texts(self.data))

    def part(self, title: str) -> dict[str, Any]:
        return next(part for part in (*self.data["first"], *self.data["last"]) if part["title"] == title)

    def guarantee(self, key: str) -> dict[str, Any]:
        return next(guarantee for guarantee in self.data["state"]["guarantees"] if guarantee["key"] == key)


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from texts(item)


def saved(run_dir: Path, **options: Any) -> Saved:
    write_report(run_dir, run_dir / "report.html", **options)
    return Saved((run_dir / "report.html").read_text())


def run_of_two(rounds: int = 3, *, is_finished: bool = True) -> list[Fact]:
    """A run of a and b, with a loss that falls by 1 each step and a checkpoint after round 2."""
    facts = [fact for one in run_of(("a", "b"), rounds, round_s=25.0) for fact in one]
    for _, record in facts:
        if "kind" not in record:
            record |= {"train/loss": 5.0 - record["step"], "eval/step": record["step"], "eval/loss": 4.25}
    facts.append(event("a", 60, "checkpoint_committed", round=2, step=2, bytes=4096, took_s=1.5))
    if is_finished:
        ends = {"run_finished": {"step": 3}, "left": {"reason": "done"}}
        facts += [event(node_id, 100, kind, **fields) for node_id in ("a", "b") for kind, fields in ends.items()]
    return sorted(facts, key=lambda fact: fact.record["at_s"])


CONFIG = f"""log_level = "INFO"
[run]
id = "r"
# token = "{PASSWORD}"
token = "{PASSWORD}"
[fault]
detect_s = 5.0
[ckpt]
path = "s3://key:{PASSWORD}@bucket/ckpt"
[data]
tokenizer = "byte"
tokens = "https://host/x?X-Amz-Signature={PASSWORD}&a=1"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two nodes that finished."""
    write(tmp_path / "r", run_of_two())
    for name in ("a", "b"):
        (tmp_path / "r" / name / "config.toml").write_text(CONFIG + f'[node]\nid = "{name}"\n')
    return tmp_path / "r"


def test_report_has_the_figures_of_the_run(folder: Path) -> None:
    told = saved(folder)
    run = told.data["state"]["run"]
    assert (run["state"], run["step"], run["total_steps"], run["round"]) == ("finished", 3, 100, 3)
    assert (run["loss"], run["held_out"], run["parameters"], run["sent_bytes"]) == (2.0, 4.25, 1000, 60)
    assert [one["step"] for one in told.data["state"]["checkpoints"]] == [2]
    assert told.guarantee("ledger")["words"] == "24 samples of 3 rounds were replayed: each was trained once."
    assert told.data["series"].keys() == {"tokens", "time", "bytes", "step"}
    loss = next(one for one in told.data["series"]["step"]["series"] if one["key"] == "loss")
    assert (loss["x"][0], loss["y"][0], loss["y"][-1]) == (1, 4.0, 2.0)
    assert "zeroband export" in told.text and "a finished all 3 steps." in told.text


def test_page_needs_no_other_file_and_runs_its_own_scripts_alone(folder: Path) -> None:
    html = saved(folder).html
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="(.*?)">', html)
    hashes = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert re.findall(r"script-src ([^;]*);", policy) == [" ".join(f"'sha256-{one}'" for one in hashes)]
    assert policy.startswith("default-src 'none';") and len(hashes) == 2
    assert re.findall(r"/static/|\simport |^export |\ssrc=\"(?!data:)|href=\"(?!data:|#)", html) == []
    assert all(html.count(f"<{tag}>") for tag in ("style", "title"))


def test_secrets_are_in_no_part_of_it(folder: Path) -> None:
    write(folder, [event("b", 101, "run_failed", error=f"StoreLost: redis://u:{PASSWORD}@host:6379 is away")])
    told = saved(folder)
    assert PASSWORD not in told.html
    assert "@host:6379 is away" in told.text and "byte" in told.text


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token", True), ("api_key", True), ("run_token", True), ("token_file", False), ("tokenizer", False),
     ("total_tokens", False), ("password", True)],
)  # fmt: skip
def test_secret_keys_are_told_by_their_names(name: str, expected: bool) -> None:
    assert is_secret(name) == expected


def test_whatever_nodes_wrote_ends_no_element_and_is_data(tmp_path: Path) -> None:
    name = "node<i>"
    more = [
        step(name, 199, 4, **{f"train/loss/{EVIL}": 1.0}),
        event(name, 200, "run_failed", error=EVIL),
        event(name, 201, f"kind{EVIL}", x=EVIL),
        event(name, 202, "sample_written", path="x", text=f"{EVIL}\x00\x1b["),
    ]
    write(tmp_path / "r<b>", [*(Fact(name, fact.record) for fact in run_of_two() if fact.node_id == "a"), *more])
    (tmp_path / "r<b>" / name / "config.toml").write_text(f"[data]\ntext = '{EVIL}'\n")
    told = saved(tmp_path / "r<b>")
    assert told.text.count(EVIL) >= 4 and EVIL not in told.html and "<title>r&lt;b&gt;: report</title>" in told.html
    assert told.html.count("<script") == 3 and not {"\x00", "\x1b"} & {*told.text, *told.html}


def test_keys_that_differ_between_nodes_stand_apart(folder: Path) -> None:
    marked = [table for table in saved(folder).part("Configuration")["tables"] if table["is_marked"]]
    assert [(table["columns"], table["rows"]) for table in marked] == [(["key", "a", "b"], [["node.id", "a", "b"]])]


def test_unknown_values_are_said_to_be_not_measured() -> None:
    record = RunRecord("empty", RunHistory("empty"), BEGIN_S, RunContext("runs/empty"), audit_missing="no round")
    told = "\n".join(texts(saved_data(record)))
    for what in ("Rounds", "Data audit", "Configuration"):
        assert f"{what}: not measured" in told, what
    assert "No node has recorded anything yet." in told and "Nothing was recorded here" in told


def test_run_that_was_killed_with_a_half_written_line_is_told_as_far_as_it_went(tmp_path: Path) -> None:
    place = tmp_path / "r" / "a"
    write(tmp_path / "r", [fact for fact in run_of_two(2, is_finished=False) if fact.node_id == "a"])
    for file in ("events.jsonl", "metrics.jsonl"):
        with (place / file).open("a") as broken:
            broken.write('[1]\n{"at_s": 17, "st')
    (place / "config.toml").write_text("[broken")
    (tmp_path / "r" / "b").mkdir()
    (tmp_path / "r" / "b" / "events.jsonl").write_bytes(b"\xff\xfe\n{}\n")
    told = saved(tmp_path / "r")
    assert told.data["state"]["run"]["state"] == "stalled"
    assert "not finished; the same command with --resume continues from the checkpoint of step 2" in told.text
    assert "Unreadable lines of the nodes' files: 4" in told.text
    assert "Invalid" in told.text or "Expected" in told.text  # what is wrong with config.toml


def test_skipped_samples_and_unequal_states_are_called_broken(folder: Path) -> None:
    wrong = run_of_two()
    for node_id, record in wrong:
        if record.get("round") == 2 and "progress" in record:
            record["progress"]["ledgers"][""]["next"] += 3
        if record.get("round") == 3:
            record["digest"] = node_id
    for file in folder.glob("*/*.jsonl"):
        file.unlink()
    write(folder, wrong)
    told = saved(folder)
    assert (told.guarantee("divergence")["state"], told.guarantee("ledger")["state"]) == ("bad", "bad")
    steps = "\n".join(told.part("What to do next")["lines"])
    assert "Nodes recorded different outer states after round 3." in steps
    assert "do not use this model" in steps


def test_cost_is_that_of_the_hours_that_nodes_were_up(folder: Path) -> None:
    told = saved(folder, price_per_hour=36.0, currency="EUR")
    assert "cost: 2.00 EUR" in told.part("Cost")["lines"]  # two nodes, 100 s each
    assert told.data["state"]["run"]["cost"] == {"so_far": pytest.approx(2.0), "per_hour": 0, "currency": "EUR"}
    assert "not measured: zeroband report" in saved(folder).text


@pytest.mark.slow
def test_size_is_bounded_for_a_long_run() -> None:
    history = history_of(fact for facts in run_of(("a", "b"), 1200, round_s=10.0) for fact in facts)
    html = saved_page("long", saved_data(RunRecord("long", history, BEGIN_S, RunContext("runs/long"))))
    assert len(history.rounds(most=10_000)) < 1000
    assert 150_000 < len(html.encode()) < 500_000


def test_command_names_what_it_wrote_and_refuses_a_folder_without_a_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert zeroband.cli.main(["report", str(folder), "--out", str(tmp_path / "x.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "x.html")
    assert zeroband.cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert zeroband.cli.main(["report", str(folder), "--out", str(tmp_path / "no" / "x.html")]) == 2
    assert "name another file with --out" in capsys.readouterr().err
    assert not list(tmp_path.glob(".x*"))


def test_events_too_large_to_hold_are_not_audited_and_that_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zeroband.tools.report.record.AUDITED_BYTES", 100)
    said = f"Data audit: not measured; the events are too large to replay here; run `zeroband data audit {folder}`"
    assert said in saved(folder).text
