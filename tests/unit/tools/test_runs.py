from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from zeroband.observe.words import age
from zeroband.tools.runs import main, runs_in

NOW_S = 10_000.0


def _write(
    run_dir: Path,
    node_id: str,
    *lines: object,
    ended: str | None = None,
    written_at_s: float = NOW_S,
    begin_s: float = 1.0,
    line: str | None = None,
) -> Path:
    """A node's files: metrics and events; a line that is a text is written as it is. `line`: of rounds, if any."""
    node_dir = run_dir / node_id
    node_dir.mkdir(parents=True)
    events: list[object] = [
        {"at_s": begin_s, "kind": "node_started", "total_steps": 100, "local_world_size": 1, "parameters": 7},
        {"at_s": begin_s, "kind": "joined", "member_id": f"{node_id}#a", "round": 0},
    ]
    if line is not None:
        round = {"round": 0, "epoch": 1, "members": [f"{node_id}#a"], "digest": line}
        events.append({"at_s": begin_s, "kind": "round_committed", **round, "progress": {"founding": line}})
    if ended is not None:
        events.append({"at_s": NOW_S, "kind": ended, "step": 100, "error": "no", "reason": "asked"})
    for name, records in (("events.jsonl", events), ("metrics.jsonl", lines)):
        texts = (line if isinstance(line, str) else json.dumps(line) for line in records)
        (node_dir / name).write_text("".join(f"{text}\n" for text in texts))
        os.utime(node_dir / name, (written_at_s, written_at_s))
    return node_dir


def _step(step: int, at_s: float, loss: float = 2.0) -> dict[str, object]:
    return {"at_s": at_s, "step": step, "train/loss": loss}


def test_runs_are_listed_newest_first_with_what_they_have_reached(tmp_path: Path) -> None:
    _write(tmp_path / "old", "a", _step(100, 50.0), ended="run_finished", written_at_s=50.0)
    _write(tmp_path / "new", "a", _step(7, 60.0, 3.0), written_at_s=NOW_S - 1)
    _write(tmp_path / "new", "b", _step(8, 60.0, 4.0), written_at_s=NOW_S - 2)
    _write(tmp_path / "still", "a", _step(9, 60.0), written_at_s=NOW_S - 500)
    _write(tmp_path / "broken", "a", _step(9, 60.0), ended="run_failed", written_at_s=NOW_S - 900)
    found = {run.run_id: run for run in runs_in(tmp_path, now_s=NOW_S)}
    assert {name: run.state for name, run in found.items()} == {
        "old": "finished",
        "new": "training",
        "still": "silent",
        "broken": "failed",
    }
    new = found["new"]
    assert (new.step, new.total_steps, new.nodes, new.nodes_in, new.written_at_s) == (8, 100, 2, 2, NOW_S - 1)
    assert [run.run_id for run in runs_in(tmp_path, now_s=NOW_S)] == ["new", "still", "broken", "old"]


def test_clock_of_a_node_a_day_off_decides_nothing(tmp_path: Path) -> None:
    _write(tmp_path / "ahead", "a", _step(7, NOW_S + 86_400), written_at_s=NOW_S - 500)
    _write(tmp_path / "behind", "a", _step(7, NOW_S - 86_400), written_at_s=NOW_S - 5)
    assert [(run.run_id, run.state) for run in runs_in(tmp_path, now_s=NOW_S)] == [
        ("behind", "training"),
        ("ahead", "silent"),
    ]


def test_two_runs_of_one_name_are_not_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "two", "a", _step(90, 500.0, 9.0), line="first")
    _write(tmp_path / "two", "b", _step(5, 500.0, 2.0), line="second", begin_s=400.0)
    (run,) = runs_in(tmp_path, now_s=NOW_S)
    assert (run.step, run.loss, run.nodes, run.nodes_in, run.nodes_of_others) == (5, 2.0, 2, 1, 1)
    assert main([str(tmp_path)]) == 0
    assert "1 of 2, 1 of another run" in capsys.readouterr().out


def test_runs_survive_what_a_crash_left_behind(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "half" / "node" / "metrics.jsonl").parent.mkdir(parents=True)
    (tmp_path / "half" / "node" / "metrics.jsonl").write_bytes(b"\xff\xfe\x00{")
    odd = ("{", "[1]", "null", '{"at_s": "x"}', '{"step": {}}', '{"kind": 3, "at_s": null}', '{"kind": "joined"')
    _write(tmp_path / "odd", "a", *odd, _step(3, 20.0))
    (tmp_path / "folder" / "a" / "metrics.jsonl").mkdir(parents=True)
    found = {run.run_id: run for run in runs_in(tmp_path, now_s=NOW_S)}
    assert set(found) == {"half", "odd", "folder"}
    assert (found["half"].state, found["odd"].step) == ("empty", 3)


def test_runs_read_little_of_a_long_run(tmp_path: Path) -> None:
    node_dir = _write(tmp_path / "long", "a")
    with (node_dir / "metrics.jsonl").open("w") as file:
        file.truncate(1 << 40)  # sparse
        file.seek(0, 2)
        file.write("\n" + json.dumps(_step(10**6, NOW_S)) + "\n")
    (run,) = runs_in(tmp_path, now_s=NOW_S)
    assert (run.step, run.state) == (10**6, "training")


def test_main_prints_a_table_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write(tmp_path / "mine", "a", _step(5, 20.0, 2.5), ended="run_finished")
    assert main([str(tmp_path)]) == 0
    header, line = capsys.readouterr().out.splitlines()
    assert header.split()[:2] == ["run", "state"]
    assert line.split()[:4] == ["mine", "finished", "5/100", "2.500"]
    assert main([str(tmp_path), "--json"]) == 0
    (record,) = json.loads(capsys.readouterr().out)
    assert (record["run_id"], record["state"], record["loss"]) == ("mine", "finished", 2.5)


def test_main_says_that_there_is_no_run_and_refuses_what_is_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    assert "no run in" in capsys.readouterr().out
    assert main([str(tmp_path / "none")]) == 2
    assert "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "0 s"), (59, "59 s"), (60, "1 min"), (7200, "2 h"), (3 * 86400, "3 d")]
)
def test_age_has_its_largest_unit(seconds: float, shown: str) -> None:
    assert age(seconds) == shown
