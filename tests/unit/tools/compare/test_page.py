"""The table, the claims, the document and its figures, from made-up outcomes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.tools.compare.outcomes import counted, failed, outcome

from zeroband.config.model import LlamaConfig, TransformersConfig
from zeroband.errors import ConfigError
from zeroband.tools.compare.claims import Claim, check, interval_of, parse_claims
from zeroband.tools.compare.figures import charts, write_pngs
from zeroband.tools.compare.methods import Arm, parse_arms
from zeroband.tools.compare.page import COLUMNS, UNITS, ComparisonResult, cells, document, model_in_words, table
from zeroband.tools.compare.results import RunResult
from zeroband.tools.compare.table import (
    Losses,
    Row,
    best_lr,
    figure_of,
    find,
    is_bracketed,
    next_lr,
    row_of,
    statement,
)
from zeroband.tools.plan.forecast import Link

LINK = Link(1e6, 1e6, 0.05)
ALONE = counted(nodes=1, rounds=0, sent=0)
OUTCOMES = [
    *(outcome("single", lr, loss, found=ALONE) for lr, loss in ((1e-3, 1.80), (2e-3, 1.76), (4e-3, 1.79))),
    *(outcome("ddp", lr, loss) for lr, loss in ((1e-3, 1.69), (2e-3, 1.60), (4e-3, 1.61))),
    outcome("ddp", 2e-3, 1.62, seed=1),
    *(outcome("diloco", lr, loss, found=counted(sent=300.0)) for lr, loss in ((1e-3, 1.63), (2e-3, None))),
    failed("demo", 1e-3),
]


def rows(outcomes: list[RunResult] = OUTCOMES, arms: Sequence[str] = ("single", "ddp", "diloco", "demo")) -> list[Row]:
    return [row_of(arm, outcomes, LINK, overlap_steps=0, step_s=None) for arm in parse_arms(arms)]


ARMS = [*parse_arms(["single", "ddp", "diloco", "demo"]), *(Arm(name, "diloco") for name in ("zero", "odd", "big"))]


def report() -> ComparisonResult:
    found = rows()
    verdicts = check([Claim("ppl_ratio", "diloco", "ddp", at_most=1.03)], found)
    about = ("A & B", "zeroband compare", [("machine", "<2 cores>")])
    return ComparisonResult(*about, found, OUTCOMES, verdicts, ["diloco: few"],
                  charts(found, "8mbit,50ms"))  # fmt: skip


def test_line_is_that_of_the_best_learning_rate_over_its_seeds() -> None:
    single, ddp, diloco, demo = rows()
    assert (ddp.lr, ddp.losses, ddp.is_bracketed, [*ddp.search]) == (2e-3, (1.60, 1.62), True, [1e-3, 2e-3, 4e-3])
    assert ddp.loss == pytest.approx(1.61) and ddp.spread == pytest.approx(0.02)
    assert (diloco.lr, diloco.is_bracketed) == (1e-3, False)
    assert (demo.lr, demo.loss, demo.failures) == (None, None, ("lr 0.001, seed 0: node1 ended with 1: boom\nmore",))
    assert single.payload_ratio is None and diloco.payload_ratio == pytest.approx(200_000 / (300 / 1.5))


def test_ratio_and_gap_compare_with_the_bracketed_baseline() -> None:
    single, ddp, diloco, demo = (row.loss for row in rows())
    assert figure_of("ppl_ratio", diloco, ddp) == pytest.approx(math.exp(0.02))
    assert figure_of("gap", diloco, single, ddp) == pytest.approx(0.13 / 0.15)
    assert [figure_of("gap", loss, single, ddp) for loss in (single, ddp, demo)] == [0.0, 1.0, None]
    assert figure_of("ppl_ratio", diloco, demo) is None and find(rows(), "demo") is None


def test_statement_says_what_flatters() -> None:
    assert statement(rows()) == [
        "Best learning rate at the edge of those tried: diloco.",
        "One seed: the spread between seeds is unknown, so small differences mean nothing.",
        "Failed runs: demo.",
    ]
    cut_off = statement(rows([o for o in OUTCOMES if o.lr < 4e-3]))
    assert cut_off[0].startswith("The best learning rate of ddp, 0.002, lies at the edge of those tried (0.001")
    assert "favours all others" in cut_off[0]
    assert statement(rows([o for o in OUTCOMES if o.arm != "ddp"]))[0].startswith("No data parallel baseline")


def test_table_shows_failed_and_diverged_runs_and_keeps_its_columns() -> None:
    found = rows([*OUTCOMES[:-1], outcome("demo", 1e-3, None)])
    assert [len(cells(row, found)) for row in found] == [len(COLUMNS)] * 4
    assert cells(found[3], found)[:3] == ("demo", "diverged", "-")
    assert cells(rows()[3], rows())[:3] == ("demo", "failed", "-")
    shown = dict(zip(COLUMNS, cells(found[2], found), strict=True))
    assert shown["lr"] == "0.001 (edge)" and shown["of ddp"] == "1.0202" and shown["gap closed"] == "87 %"
    assert shown["up"] == "0.06" and shown["rounds"] == "10"


def test_claims_are_checked_and_what_is_missing_is_not_met_nor_broken() -> None:
    claims = parse_claims(
        [
            {"figure": "ppl_ratio", "of": "diloco", "over": "ddp", "at_most": 1.04},
            {"figure": "gap", "of": "diloco", "over": "ddp", "to": "single", "at_most": 0.05},
            {"figure": "bytes_ratio", "of": "diloco", "over": "ddp", "at_least": 19.6, "at_most": 20.4},
            {"figure": "payload_ratio", "of": "demo", "at_least": 857},
            {"figure": "loss_ratio", "of": "diloco", "over": "ddp", "at_most": 1.0188},
        ]
    )
    second = (("single", 2e-3, 1.79), ("diloco", 1e-3, 1.6505))
    verdicts = check(claims, rows([*OUTCOMES, *(outcome(*one, seed=1) for one in second)]))
    assert [verdict.answer for verdict in verdicts] == ["met", "NOT MET", "met", "not measured", "cannot tell"]
    assert str(verdicts[0]).endswith("at most 1.04; found 1.031, 95 % of 1.027 to 1.034 over 2 seeds")
    assert str(verdicts[2]).endswith("at most 20.4; found 20")
    alone = check(claims, rows())
    assert [verdict.answer for verdict in alone] == ["cannot tell", "cannot tell", "met", "not measured", "cannot tell"]
    assert "found 1.03 with one seed, spread unknown" in str(alone[0])


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=30), st.floats(-5, 5))
def test_interval_is_symmetric_moves_with_the_figures_and_narrows_with_more_seeds(
    figures: list[float], shift: float
) -> None:
    found, moved = interval_of(figures), interval_of([figure + shift for figure in figures])
    assert found.low <= found.mean <= found.high and found.seeds == len(figures)
    assert found.mean - found.low == pytest.approx(found.high - found.mean, abs=1e-9)
    assert (moved.low, moved.high) == pytest.approx((found.low + shift, found.high + shift), abs=1e-6)
    twice = interval_of(figures * 2)
    assert twice.high - twice.low <= found.high - found.low + 1e-9


def test_interval_is_that_of_students_t() -> None:
    """Against tables: 12.706 and 2.776 standard errors."""
    assert interval_of([1.0, 1.2]).high == pytest.approx(1.1 + 12.706 * 0.1)
    five = interval_of([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (five.low, five.high) == pytest.approx((3 - 2.776 * math.sqrt(0.5), 3 + 2.776 * math.sqrt(0.5)), abs=1e-3)
    assert interval_of([2.0]).low == -math.inf


def test_figures_are_paired_by_seed() -> None:
    """Seeds that differ by far more than the methods do: in pairs they tell, as two means they would not."""
    pairs = [(1.5, 1.51), (1.9, 1.912), (1.2, 1.2085)]
    outcomes = [
        outcome(arm, 1e-3, pair[place], seed=seed)
        for seed, pair in enumerate(pairs)
        for place, arm in enumerate(("ddp", "diloco"))
    ]
    (verdict,) = check([Claim("loss_ratio", "diloco", "ddp", at_most=1.01)], rows(outcomes, ["ddp", "diloco"]))
    assert verdict.answer == "met" and verdict.found is not None and verdict.found.seeds == 3


def test_learning_rate_is_chosen_on_one_half_and_reported_on_the_other() -> None:
    low, high = outcome("ddp", 1e-3, 1.6), replace(outcome("ddp", 2e-3, 1.5), tuning_loss=1.7)
    (row,) = rows([low, high], ["ddp"])
    assert (row.lr, row.loss, row.chosen_by) == (1e-3, 1.6, 1.6)


@pytest.mark.parametrize(
    ("claim", "more", "why"),
    [
        (Claim("ppl_ratio", "eager", "ddp", at_most=2), [], "eager is not in this comparison"),
        (Claim("ppl_ratio", "diloco", "eager", at_most=2), [], "eager is not in this comparison"),
        (Claim("payload_ratio", "demo", at_least=0), [], "no run of demo ended with a loss"),
        (Claim("loss_ratio", "demo*", "ddp", at_most=2), [], "no run of demo* ended with a loss"),
        (
            Claim("ppl_ratio", "diloco", "ddp", at_most=2),
            [outcome("diloco", 1e-3, None, seed=1)],
            "diloco has a run without a loss (lr 0.001, seed 1: it diverged)",
        ),
        (
            Claim("ppl_ratio", "diloco", "ddp", at_most=2),
            [failed("ddp", 8e-3)],
            "ddp has a run without a loss (lr 0.008, seed 0: node1 ended with 1: boom)",
        ),
        (Claim("payload_ratio", "single", at_least=0), [], "the runs do not give this figure"),
        (Claim("loss_ratio", "diloco", "zero", at_most=2), [outcome("zero", 1e-3, 0.0)], "cannot be computed: float"),
        (Claim("loss_ratio", "odd", "ddp", at_least=0), [outcome("odd", 1e-3, math.inf)], "odd ended with a loss"),
        (Claim("ppl_ratio", "big", "ddp", at_least=0), [outcome("big", 1e-3, 1e4)], "cannot be computed: math range"),
    ],
)
def test_claim_without_evidence_is_not_measured_and_says_why(claim: Claim, more: list[RunResult], why: str) -> None:
    arms = [row_of(arm, [*OUTCOMES, *more], LINK, overlap_steps=0, step_s=None) for arm in ARMS]
    (verdict,) = check([claim], arms)
    assert (verdict.found, verdict.answer) == (None, "not measured")
    assert str(verdict).startswith("not measured: ") and why in str(verdict)


def test_claim_about_a_pattern_is_about_the_best_that_fits() -> None:
    outcomes = [
        outcome("eager:lr=0.4", 1e-3, 1.7),
        outcome("eager:lr=0.4", 1e-3, 1.4, seed=1),  # the best mean, but not with the seed that chooses
        outcome("eager:lr=0.8", 1e-3, 1.6),
        outcome("eager:lr=0.8", 1e-3, 1.6, seed=1),
        outcome("eager:lr=2", 1e-3, None),
        outcome("diloco:lr=0.8", 1e-3, 1.5),
    ]
    tables = [
        {"figure": "loss_ratio", "of": "eager:*", "over": "diloco:*", "at_most": 1.1},
        {"figure": "loss_ratio", "of": "eager:*", "over": "ddp:*", "at_most": 1.1},
    ]
    said, missing = check(parse_claims(tables), rows(outcomes, list(dict.fromkeys(o.arm for o in outcomes))))
    assert said.found is not None and said.found.mean == pytest.approx(1.6 / 1.5)
    assert str(said).startswith(
        "cannot tell: loss_ratio of eager:* (eager:lr=0.8) over diloco:* (diloco:lr=0.8): at most 1.1"
    )
    assert missing.found is None and "over ddp:*:" in str(missing)


@pytest.mark.parametrize("table", [{"figure": "x", "of": "a", "at_most": 1}, {"figure": "gap", "of": "a"}, {"fig": 1}])
def test_claim_without_a_figure_or_a_limit_is_refused(table: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"compare\.claims"):
        parse_claims([table])


def test_document_has_the_table_first_and_everything_that_was_compared() -> None:
    told = document(report(), ["loss-tokens.png", "loss-time.png"])
    assert told.startswith(table(report())) and "cannot tell: ppl_ratio" in told
    assert re.findall(r"^## (.*)", told, re.MULTILINE) == [
        *("Held-out loss", "What the columns mean", "A & B", "Known of these settings", "All runs"),
    ]
    assert re.findall(r"!\[(.*?)\]\((.*?)\)", told) == [
        ("held-out loss, nats per token against tokens of all nodes", "loss-tokens.png"),
        ("held-out loss, nats per token against seconds, simulated for 8mbit,50ms", "loss-time.png"),
    ]
    for figure in ("| machine | <2 cores> |", "```bash\nzeroband compare\n```", "- diloco: few", "1.6100 +-0.0100"):
        assert figure in told, figure
    assert "| demo | 0.001 | 0 | failed | - | 3 | node1 ended with 1: boom |" in told
    assert "Held-out loss" not in document(report(), [])


def test_columns_are_told_with_their_units_and_meanings() -> None:
    told = document(report(), [])
    assert all(f"- {name} ({UNITS[name]}): {meaning}" in told for name, meaning in COLUMNS.items() if name in UNITS)
    assert COLUMNS.keys() - UNITS.keys() == {"method", "lr", "ppl", "rounds"}, "these have no unit"


def test_markdown_table_has_a_line_for_each_method() -> None:
    lines = table(report()).splitlines()
    assert [line.count("|") for line in lines[:6]] == [len(COLUMNS) + 1] * 6
    assert lines[-1].startswith("- cannot tell: ppl_ratio")


def test_charts_have_what_was_measured() -> None:
    tokens, sent, seconds = charts(rows(), "8mbit,50ms")
    assert [*tokens.lines] == ["single", "ddp", "diloco"] and [*sent.lines] == ["ddp", "diloco"]
    assert tokens.lines["ddp"] == [(10_000, pytest.approx(2.11)), (20_000, pytest.approx(1.61))]
    assert tokens.lines["diloco"] == [(10_000, 2.13), (20_000, 1.63)]
    ends = {name: points[-1][0] for name, points in seconds.lines.items()}
    assert ends["ddp"] > ends["diloco"] > ends["single"]


def test_place_that_one_seed_has_not_kept_is_left_out_of_the_curve() -> None:
    first, second = outcome("ddp", 1e-3, 1.6), outcome("ddp", 1e-3, 1.8, seed=1)
    second = replace(second, points=second.points[1:])
    row = row_of(parse_arms(["ddp"])[0], [first, second], LINK, overlap_steps=0, step_s=None)
    assert charts([row], "8mbit,50ms")[0].lines == {"ddp": [(20_000, pytest.approx(1.7))]}


def test_figures_are_written_where_matplotlib_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra compare")
    files = write_pngs(charts(rows(), "8mbit,50ms"), tmp_path)
    assert [path.name for path in files] == ["loss-tokens.png", "loss-bytes.png", "loss-time.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)


# -- which learning rate counts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("losses", "best", "bracketed"),
    [
        ({1e-3: 1.7, 2e-3: 1.6, 4e-3: 1.65}, 2e-3, True),
        ({1e-3: 1.7, 2e-3: 1.65, 4e-3: 1.6}, 4e-3, False),
        ({1e-3: 1.6, 2e-3: 1.65, 4e-3: 1.7}, 1e-3, False),
        ({1e-3: 1.7, 2e-3: 1.6, 4e-3: None}, 2e-3, True),
        ({1e-3: None, 2e-3: None}, None, False),
        ({2e-3: 1.6}, 2e-3, False),
    ],
)
def test_best_is_bracketed_when_a_worse_one_was_tried_on_each_side(
    losses: Losses, best: float | None, bracketed: bool
) -> None:
    assert (best_lr(losses), is_bracketed(losses)) == (best, bracketed)


@pytest.mark.parametrize(
    ("losses", "most", "following"),
    [
        ({1e-3: 1.7, 2e-3: 1.6, 4e-3: 1.65}, 9, None),
        ({1e-3: 1.7, 2e-3: 1.65, 4e-3: 1.6}, 9, 8e-3),
        ({1e-3: 1.6, 3e-3: 1.65}, 9, 3.33e-4),
        ({1e-3: 1.7, 2e-3: 1.65, 4e-3: 1.6}, 3, None),
        ({2e-3: 1.6}, 9, 4e-3),
        ({1e-3: None, 2e-3: None}, 9, 5e-4),
    ],
)
def test_next_one_lies_beyond_the_edge_where_the_best_is(losses: Losses, most: int, following: float | None) -> None:
    assert next_lr(losses, most=most) == following


def test_search_ends_with_a_bracket_or_with_its_tries() -> None:
    losses: dict[float, float | None] = {1e-3: 3.0, 2e-3: 2.9}
    while (lr := next_lr(losses, most=8)) is not None:
        losses[lr] = 1.0 + abs(lr - 0.016)
    assert is_bracketed(losses) and best_lr(losses) == 0.016
    endless: dict[float, float | None] = {1e-3: 3.0, 2e-3: 2.9}
    while (lr := next_lr(endless, most=5)) is not None:
        endless[lr] = -lr
    assert len(endless) == 5 and not is_bracketed(endless)


# -- a model in a sentence ------------------------------------------------------------------------------------------


def test_decoder_is_told_by_its_size_and_shape() -> None:
    config = LlamaConfig(d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=192, tie_embeddings=True)
    assert model_in_words(config, 1_234_567) == (
        "1.23M trained parameters: a Llama decoder of 2 layers, width 64, 4 heads over 2 of keys and values, "
        "SwiGLU of 192; embedding tied to the output head"
    )
    assert model_in_words(LlamaConfig(), 0).startswith("a Llama decoder of 4 layers, width 256, 4 heads, SwiGLU")


def test_other_model_is_told_by_its_keys() -> None:
    said = model_in_words(TransformersConfig(type="transformers", name="gpt2"), None)
    assert said.startswith("transformers (") and "name gpt2" in said
