"""The report of a run from hand-written facts: what it says, what it hides, and what it needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import zeroband.cli
from zeroband.observe.history import RunHistory
from zeroband.tools.report.command import write_report
from zeroband.tools.report.page import page
from zeroband.tools.report.record import RunRecord, is_secret, read_record

AT_S = 1_700_000_000.0
VOID = {"meta", "input", "br", "hr", "img", "link"}
PASSWORD = "hunter2"
EVIL = '<script>alert("x")</script>'


class Checked(HTMLParser):
    """Collects text, tags and what refers to other places; notes tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.tags: set[str] = set()
        self.references: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.references += [f"{name}={value}" for name, value in attrs if name in ("src", "href", "style", "srcset")]
        self.references += [f"{name}={value}" for name, value in attrs if name.startswith("on")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def committed(round: int, members: Sequence[str], at_s: float, *, used: int = 4, skip: int = 0) -> dict[str, Any]:
    """A round in which each member trained `used` samples; `skip`: samples that nobody got."""
    dealt = round * (used * len(members) + skip)
    spans = {member: [[dealt + used * n, dealt + used * (n + 1)]] for n, member in enumerate(members)}
    ledger = {"next": dealt + used * len(members), "assigned": spans, "returned": []}
    progress = {"inner_step": 10 * round, "tokens": 100 * round, "founding": "f", "follows": None}
    return {
        "at_s": at_s,
        "kind": "round_committed",
        "round": round,
        "epoch": 1,
        "members": list(members),
        "digest": f"digest-{round}",
        "weights": [1.0] * len(members),
        "samples": [used if round else 0] * len(members),
        "late": [],
        "progress": {**progress, "ledgers": {"": ledger}},
    }


def step(number: int, at_s: float, *, round: int | None = None, loss: float | None = None) -> dict[str, Any]:
    record: dict[str, Any] = {"step": number, "at_s": at_s, "train/loss": 5 - number / 10 if loss is None else loss}
    record |= {"train/tokens": 100 * number, "train/tokens_per_s": 50.0, "train/step_s": 2.0}
    if round is not None:
        record |= {"outer/round": round, "outer/nodes": 2, "outer/digest": f"digest-{round}"}
        record |= {"outer/wait_s": 0.5, "outer/transfer_s": 0.25, "outer/apply_s": 0.125, "outer/retries": 0}
        record |= {"outer/sent_bytes": 1000, "outer/ddp_bytes": 50_000, "eval/step": number, "eval/loss": 4.25}
    return record


def node_files(name: str, *, rounds: int = 3, is_finished: bool = True) -> dict[str, list[dict[str, Any]]]:
    members = ["a#1", "b#1"]
    events = [
        {"at_s": AT_S, "kind": "node_started", "total_steps": 30, "local_world_size": 1, "parameters": 1234},
        {"at_s": AT_S + 1, "kind": "joined", "member_id": f"{name}#1", "round": 0},
        *(committed(number, members, AT_S + 2 + 25 * number) for number in range(rounds + 1)),
    ]
    if name == "a":
        saved = {"round": 2, "step": 20, "bytes": 4096, "took_s": 1.5}
        events.append({"at_s": AT_S + 60, "kind": "checkpoint_committed", **saved})
    if is_finished:
        end_s = AT_S + 100
        events += [
            {"at_s": end_s, "kind": "run_finished", "step": 30},
            {"at_s": end_s, "kind": "left", "reason": "done"},
        ]
    metrics = [step(n, AT_S + 2 + 2.4 * n, round=n // 10 if n % 10 == 0 else None) for n in range(1, 10 * rounds + 1)]
    return {"events.jsonl": sorted(events, key=lambda event: event["at_s"]), "metrics.jsonl": metrics}


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
    for name in ("a", "b"):
        place = tmp_path / "r" / name
        place.mkdir(parents=True)
        for file, records in node_files(name).items():
            (place / file).write_text("".join(json.dumps(record) + "\n" for record in records))
        (place / "config.toml").write_text(CONFIG + f'[node]\nid = "{name}"\n')
    return tmp_path / "r"


@pytest.fixture
def written(folder: Path) -> Callable[..., Checked]:
    def write(**options: Any) -> Checked:
        write_report(folder, folder / "report.html", **options)
        return Checked((folder / "report.html").read_text())

    return write


def test_report_has_the_figures_of_the_run(written: Callable[..., Checked]) -> None:
    said = written().text
    for figure in ("finished", "2.0000", "from 4.9000", "4.2500", "1.23k", "of 30", "3 rounds", "4.1 kB", "step 20"):
        assert figure in said, figure
    assert "24 samples of 3 rounds were replayed: each was trained once." in said
    assert "zeroband export" in said and "a has done all 30 steps." in said


def test_document_is_well_formed_and_refers_to_nothing_else(written: Callable[..., Checked]) -> None:
    checked = written(price_per_hour=1.0)
    assert (checked.wrong, checked.open) == ([], [])
    assert checked.references == []
    assert not {"script", "iframe", "object", "link", "img", "form", "base"} & checked.tags
    assert {"svg", "table", "style", "section"} <= checked.tags
    assert not re.search(r"@import|url\(|javascript:", checked.rawdata + checked.text)


def test_secrets_are_in_no_part_of_it(written: Callable[..., Checked], folder: Path) -> None:
    failure = {"at_s": AT_S + 101, "kind": "run_failed", "error": f"StoreLost: redis://u:{PASSWORD}@host:6379 is away"}
    with (folder / "b" / "events.jsonl").open("a") as file:
        file.write(json.dumps(failure) + "\n")
    written()
    page_text = (folder / "report.html").read_text()
    assert PASSWORD not in page_text
    assert "@host:6379 is away" in page_text and "byte" in page_text


@pytest.mark.parametrize(
    ("name", "expected"),
    [("token", True), ("api_key", True), ("run_token", True), ("token_file", False), ("tokenizer", False),
     ("total_tokens", False), ("password", True)],
)  # fmt: skip
def test_secret_keys_are_told_by_their_names(name: str, expected: bool) -> None:
    assert is_secret(name) == expected


def test_whatever_nodes_wrote_is_escaped(tmp_path: Path) -> None:
    place = tmp_path / "r<b>" / "node<i>"
    place.mkdir(parents=True)
    files = node_files("a")
    files["events.jsonl"].append({"at_s": AT_S + 200, "kind": "run_failed", "error": EVIL})
    files["events.jsonl"].append({"at_s": AT_S + 201, "kind": f"kind{EVIL}", "x": EVIL})
    files["metrics.jsonl"][-1][f"train/loss/{EVIL}"] = 1.0
    files["metrics.jsonl"][-1]["train/loss/other"] = 1.0
    for file, records in files.items():
        (place / file).write_text("".join(json.dumps(record) + "\n" for record in records))
    (place / "sample.txt").write_text(f"{EVIL}\x00\x1b[31m")
    (place / "config.toml").write_text(f"[data]\ntext = '{EVIL}'\n")
    html = page(read_record(tmp_path / "r<b>", now_s=AT_S))
    checked = Checked(html)
    assert "script" not in checked.tags and "i" not in checked.tags and checked.wrong == []
    assert checked.text.count(EVIL) >= 4 and "\x00" not in html and "\x1b" not in html


def test_keys_that_differ_between_nodes_stand_apart(written: Callable[..., Checked], folder: Path) -> None:
    written()
    html = (folder / "report.html").read_text()
    marked = re.findall(r"<tr class=marked>(.*?)</tr>", html)
    assert marked == ["<td>node.id</td><td>a</td><td>b</td>"]


def test_unknown_values_are_said_to_be_not_measured() -> None:
    said = Checked(page(RunRecord("empty", "runs/empty", RunHistory("empty"), AT_S, audit_missing="no round"))).text
    for what in ("Links", "Rounds", "Events", "Data audit", "Configuration", "Membership over time", "Checkpoints"):
        assert f"{what}: not measured" in said, what
    assert "nothing recorded" in said and "nan" not in said.lower().replace("finance", "")


def test_run_that_was_killed_with_a_half_written_line_is_told_as_far_as_it_went(tmp_path: Path) -> None:
    place = tmp_path / "r" / "a"
    place.mkdir(parents=True)
    files = node_files("a", rounds=2, is_finished=False)
    for file, records in files.items():
        (place / file).write_text("".join(json.dumps(record) + "\n" for record in records) + '[1]\n{"at_s": 17, "st')
    (place / "config.toml").write_text("[broken")
    (tmp_path / "r" / "b").mkdir()
    (tmp_path / "r" / "b" / "events.jsonl").write_bytes(b"\xff\xfe\n{}\n")
    said = Checked(page(read_record(tmp_path / "r", now_s=AT_S))).text
    assert "not finished when this was read" in said and "with --resume goes on from the checkpoint of step 20" in said
    assert "could not be read, and are missing: 6" in said
    assert "Invalid" in said or "Expected" in said  # what is wrong with config.toml


def test_skipped_samples_and_unequal_states_are_called_broken(folder: Path) -> None:
    for name in ("a", "b"):
        lines = [json.loads(line) for line in (folder / name / "events.jsonl").read_text().splitlines()]
        wrong = [committed(2, ["a#1", "b#1"], AT_S + 52, skip=3) if e.get("round") == 2 and "members" in e else e
                 for e in lines]  # fmt: skip
        wrong = [e | {"digest": name} if e.get("round") == 3 else e for e in wrong]
        (folder / name / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in wrong))
    said = Checked(page(read_record(folder, now_s=AT_S))).text
    assert said.count("BROKEN") == 2
    assert "Nodes recorded different outer states after round 3." in said
    assert "do not go on with this model" in said


def test_cost_is_that_of_the_hours_that_nodes_were_up(written: Callable[..., Checked]) -> None:
    said = written(price_per_hour=36.0, currency="EUR").text
    assert "2.00 EUR" in said  # two nodes, 100 s each
    assert "Cost" in said and "not measured: zeroband report" in written().text


@pytest.mark.slow
def test_size_is_bounded_for_a_long_run() -> None:
    history = RunHistory("long")
    for name in ("a", "b"):
        for fact in _long(name):
            history.add((name, fact))  # type: ignore[arg-type]
    html = page(RunRecord("long", "runs/long", history, AT_S))
    assert len(history.rounds(most=10_000)) < 1000
    assert 20_000 < len(html.encode()) < 400_000


def _long(name: str) -> list[Mapping[str, Any]]:
    members = ["a#1", "b#1"]
    found: list[Mapping[str, Any]] = [{"at_s": AT_S, "kind": "joined", "member_id": f"{name}#1", "round": 0}]
    for number in range(1, 1200):
        found += [step(10 * number, AT_S + 10 * number, round=number), committed(number, members, AT_S + 10 * number)]
    return found


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
    said = Checked(page(read_record(folder, now_s=AT_S))).text
    assert (
        f"Data audit: not measured; the events are too large to replay here; run `zeroband data audit {folder}`" in said
    )
