"""What the planner learns from a run: two recorded runs, and what each says of itself and of the other one."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from zeroband import cli
from zeroband.errors import ConfigError
from zeroband.tools.plan.command import human_time
from zeroband.tools.plan.forecast import forecast_of
from zeroband.tools.plan.recorded import Recorded, read_run

PARAMS, STEPS, TWICE = 935_040, 10, 2.0

Row = tuple[float, float, float, float, float, float]
"""Seconds of a round of one node: of all its steps but the last, of that with the outer step, and in the round blocked,
waited, transferred and applied."""

# zeroband simulate 2 1 src/zeroband/train.py @debug/sparseloco, then @debug/diloco: 2 cores that other work shared.
SPARSELOCO: Sequence[Sequence[Row]] = (
    (
        (15.096, 1.073, 0.1551, 0.0172, 0.0404, 0.0051),
        (14.35, 1.614, 0.4795, 0.3345, 0.051, 0.0018),
        (6.797, 1.324, 0.4414, 0.1961, 0.0012, 0.0175),
        (7.876, 0.812, 0.1148, 0.0354, 0.0034, 0.0021),
        (7.955, 1.036, 0.179, 0.0475, 0.0034, 0.0215),
    ),
    (
        (12.08, 4.076, 2.4409, 2.1494, 0.0331, 0.002),
        (14.79, 1.187, 0.2304, 0.122, 0.0507, 0.0016),
        (7.199, 0.9, 0.1084, 0.011, 0.0107, 0.0031),
        (7.635, 1.117, 0.1595, 0.0507, 0.0007, 0.0055),
        (7.951, 0.975, 0.3746, 0.1515, 0.0027, 0.006),
    ),
)
DILOCO: Sequence[Sequence[Row]] = (
    (
        (7.918, 0.612, 0.2193, 0.1548, 0.0295, 0.0255),
        (5.862, 3.125, 2.5786, 2.5594, 0.0069, 0.003),
        (10.838, 3.45, 2.0574, 2.0098, 0.0207, 0.0031),
        (13.054, 1.329, 0.3224, 0.3006, 0.0056, 0.0038),
        (7.053, 0.589, 0.0363, 0.0147, 0.008, 0.0039),
    ),
    (
        (8.116, 0.39, 0.0455, 0.0092, 0.0271, 0.004),
        (8.365, 0.65, 0.0272, 0.0072, 0.009, 0.006),
        (11.771, 2.561, 0.2209, 0.0332, 0.0226, 0.0385),
        (13.69, 0.649, 0.0353, 0.0119, 0.0055, 0.0025),
        (5.809, 1.823, 1.1701, 1.1506, 0.0071, 0.0025),
    ),
)
STREAMING: Sequence[Sequence[Row]] = (
    (
        (2.213, 0.45, 0.008, 0.0193, 0.0515, 0.0078),
        (1.935, 0.416, 0.0026, 0.1012, 0.0109, 0.0025),
        (2.017, 0.719, 0.0111, 0.023, 0.0301, 0.0109),
        (2.794, 0.912, 0.0069, 0.0227, 0.1088, 0.0067),
        (2.733, 0.711, 0.0023, 0.0493, 0.053, 0.0022),
        (2.24, 0.671, 0.0102, 0.0944, 0.0786, 0.007),
    ),
    (
        (1.504, 0.43, 0.0101, 0.3128, 0.0426, 0.0099),
        (1.935, 0.325, 0.0042, 0.6567, 0.0709, 0.004),
        (2.133, 0.439, 0.0034, 0.6264, 0.0091, 0.0032),
        (2.956, 0.94, 0.0159, 0.9771, 0.1057, 0.0158),
        (2.712, 0.655, 0.0132, 0.5974, 0.0178, 0.0131),
        (2.483, 0.544, 0.0209, 0.2475, 0.0563, 0.0208),
    ),
)
"""Of @debug/streaming: a fragment every five steps, which travels beside the next two."""

SENT = {"sparseloco": 25_713, "diloco": 949_652}
MBIT = {"sparseloco": 371, "diloco": 10_568}


def recorded_run(folder: Path, outer_type: str, nodes: Sequence[Sequence[Row]]) -> Path:
    """Write what the nodes of such a run leave in its directory."""
    outer = f'[outer]\ntype = "{outer_type}"\ninner_steps = {STEPS}\nfragments = 1\noverlap = 0\n'
    link = {"to": "other#1", "mbit_s": MBIT[outer_type], "rtt_ms": 0.29, "is_cut_off": False}
    for number, rows in enumerate(nodes):
        node = folder / f"node{number}"
        node.mkdir(parents=True)
        (node / "config.toml").write_text(f'{outer}\n[comm]\ncodec = "none"\n', encoding="utf-8")
        _write(
            node / "events.jsonl",
            [{"kind": "node_started", "parameters": PARAMS}, {"kind": "links", "links": [link]}],
        )
        _write(node / "metrics.jsonl", _steps(rows, SENT[outer_type], STEPS))
    return folder


def streaming_run(folder: Path) -> Path:
    """Write what the streaming run left, with its last line, a flush of two fragments at once."""
    recorded_run(folder, "diloco", STREAMING)
    for node, rows in zip(sorted(folder.iterdir()), STREAMING, strict=True):
        outer = '[outer]\ntype = "diloco"\ninner_steps = 10\nfragments = 2\noverlap = 2\nmerge = "mix"\n'
        (node / "config.toml").write_text(f'{outer}\n[comm]\ncodec = "int4"\n', encoding="utf-8")
        lines = _steps(rows, 248_336, STEPS // 2)
        flush = {"outer/round": len(rows) + 2, "outer/sent_bytes": 2 * 248_336, "outer/wait_s": 60.0}
        _write(node / "metrics.jsonl", [*lines, {**lines[-1], **flush}])
    return folder


def _steps(rows: Sequence[Row], sent_bytes: int, steps: int) -> list[Mapping[str, Any]]:
    lines: list[Mapping[str, Any]] = []
    for number, (before_s, last_s, *parts) in enumerate(rows, start=1):
        lines += [_step(len(lines) + i, before_s / (steps - 1)) for i in range(1, steps)]
        names = ("blocked_s", "wait_s", "transfer_s", "apply_s")
        timed = {f"outer/{name}": part for name, part in zip(names, parts, strict=True)}
        moved = {"outer/sent_bytes": sent_bytes, "outer/received_bytes": sent_bytes}
        lines.append({**_step(len(lines) + 1, last_s), **timed, **moved, "outer/round": number, "outer/nodes": 2})
    return lines


def _step(number: int, took_s: float) -> Mapping[str, Any]:
    return {"step": number, "train/step_s": took_s, "train/tokens": 4096 * number}


def _write(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    stamped = [{"at_s": 1.7e9 + number, **line} for number, line in enumerate(lines)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in stamped), encoding="utf-8")


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "sparse", "sparseloco", SPARSELOCO)


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return recorded_run(tmp_path / "dense", "diloco", DILOCO)


@pytest.fixture
def streamed(tmp_path: Path) -> Path:
    return streaming_run(tmp_path / "streamed")


def ratio(forecast: float, was: float) -> float:
    return max(forecast / was, was / forecast)


def test_settings_of_a_run_are_read(dense: Path) -> None:
    found = read_run(dense)
    assert (found.method, found.codec, found.job.params, found.job.nodes) == ("diloco", "int8", PARAMS, 2)
    assert (found.job.inner_steps, found.rounds, found.link.rtt_s) == (STEPS, 8, 0.29e-3)
    assert found.job.step_s == pytest.approx(0.9, abs=0.3)


@pytest.mark.parametrize("name", ["sparse", "dense", "streamed"])
def test_forecast_of_the_same_settings_is_within_twice_of_what_was_measured(
    name: str, request: pytest.FixtureRequest
) -> None:
    found: Recorded = read_run(request.getfixturevalue(name))
    said = found.forecast
    assert ratio(said.round_s / found.times, found.round_s) < TWICE
    assert ratio(said.transfer_s / found.times, found.transfer_s) < TWICE
    assert ratio((said.own_s + said.beside_s) / found.times - found.link.agreement_s, found.own_s) < TWICE
    assert ratio(said.sent_bytes / found.times, found.sent_bytes) < 1.01


def test_one_run_forecasts_the_round_of_the_other_method(sparse: Path, dense: Path) -> None:
    one, other = read_run(sparse), read_run(dense)
    assert ratio(forecast_of(one.job, one.link, "diloco", "int8").round_s, other.round_s) < TWICE
    assert ratio(forecast_of(other.job, other.link, "sparseloco", "two_bit").round_s, one.round_s) < TWICE


def test_first_rounds_in_which_nodes_connect_are_left_out(tmp_path: Path) -> None:
    late = [[(9.0, 1.0, 0.2, 0.1, 30.0, 0.01), *rows[1:]] for rows in DILOCO]
    assert read_run(recorded_run(tmp_path, "diloco", late)).transfer_s < 0.1


def test_wait_for_a_slow_node_is_not_taken_for_the_store(tmp_path: Path) -> None:
    fast, slow = (9.0, 3.0, 2.1, 2.0, 0.05, 0.01), (11.0, 1.0, 0.14, 0.04, 0.05, 0.01)
    found = read_run(recorded_run(tmp_path, "diloco", [[fast] * 3, [slow] * 3]))
    assert found.link.agreement_s == pytest.approx(0.04)
    assert found.job.straggling_s(STEPS, 1) == pytest.approx((2.0 - 0.04) / 2)


def test_rate_of_links_is_that_of_bytes_that_left_the_site(sparse: Path) -> None:
    usual = read_run(sparse).link
    for path in sparse.glob("*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        _write(path, [{**line, "outer/wide_bytes": line.get("outer/sent_bytes", 0) / 4} for line in lines])
    at_sites = read_run(sparse).link
    assert 4 * at_sites.up_bytes_per_s == pytest.approx(usual.up_bytes_per_s)
    assert 4 * at_sites.down_bytes_per_s == pytest.approx(usual.down_bytes_per_s)


@pytest.mark.parametrize(("name", "method"), [("sparse", "sparseloco"), ("dense", "diloco"), ("streamed", "streaming")])
def test_command_without_other_options_has_the_forecast_of_the_run_in_its_table(
    name: str, method: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = request.getfixturevalue(name)
    assert cli.main(["plan", "--from", str(run_dir)]) == 0
    said = read_run(run_dir).forecast
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.split()[:2] == [method, said.codec])
    shown = (human_time(said.transfer_s), human_time(said.round_s), f"{100 * said.compute_utilisation:.1f} %")
    assert all(f"  {cell}  " in row for cell in shown), (row, shown)


def test_fragments_are_rounds_of_their_own_and_a_flush_of_several_is_left_out(streamed: Path) -> None:
    found = read_run(streamed)
    assert (found.method, found.codec, found.times, found.job.inner_steps, found.job.overlap) == (
        "streaming", "int4", 2, 10, 2,
    )  # fmt: skip
    assert (found.rounds, found.sent_bytes) == (10, 248_336)


def test_own_work_is_what_training_stood_still_for_without_waits_and_transfer(sparse: Path, streamed: Path) -> None:
    assert read_run(sparse).own_s == pytest.approx((0.094 + 0.1081) / 2)
    assert read_run(streamed).own_s == pytest.approx(0.00685)  # its end, where the rest passes beside training


def test_waits_that_pass_beside_training_are_no_straggling(streamed: Path) -> None:
    assert read_run(streamed).job.straggling_s(STEPS, 2) < 0.01


def test_command_shows_the_run_beside_its_forecast_and_plans_others(
    sparse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--from", str(sparse), "--nodes", "16", "--up", "10mbit"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("sparse: sparseloco, two_bit values, 2 nodes\n  a round: 10.4 s, by the formulas ")
    assert " % of the slowest measured link, 371 Mbit/s; if transfers are long" in shown
    (row,) = (line.split() for line in shown.splitlines() if line.startswith("sparseloco "))
    assert row[:5] == ["sparseloco", "two_bit", "10", "387", "kB"]  # 15 payloads of 25.8 kB


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("config.toml", "no node wrote its config.toml"),
        ("metrics.jsonl", "no node committed two rounds with others; let the run go on, then plan again"),
    ],
)
def test_run_with_nothing_to_learn_from_is_refused(sparse: Path, missing: str, message: str) -> None:
    for node in sparse.iterdir():
        (node / missing).unlink()
    with pytest.raises(ConfigError, match=message):
        read_run(sparse)


def test_run_of_a_method_without_formulas_is_refused(sparse: Path) -> None:
    for node in sparse.iterdir():
        (node / "config.toml").write_text('[outer]\ntype = "custom"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="do not use a method that the planner knows"):
        read_run(sparse)


def test_recommendation_for_a_recorded_run_is_toml_with_what_was_measured_as_comments(
    sparse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--from", str(sparse), "--up", "100mbit", "--recommend"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"# {sparse.name}: sparseloco")
    assert tomllib.loads(shown)["outer"]["type"] == "diloco"
