"""What is read from files and flags, and the runs that come of it."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from zeroband.errors import ConfigError
from zeroband.tools.compare import trials
from zeroband.tools.compare.options import CompareOptions, parse_link, read_options
from zeroband.tools.compare.trials import Trial, trial, warm_up

EXPERIMENTS = sorted((Path(__file__).resolve().parents[4] / "experiments").glob("*.toml"))

FILE = """
[compare]
methods = ["ddp", "diloco:comm.codec=fp32"]
lrs = [2e-3, 1e-3]
seeds = 2
nodes = 4
warm_steps = 30
claims = [{ figure = "ppl_ratio", of = "diloco", over = "ddp", at_most = 1.03 }]

[train]
total_steps = 80
batch_size = 4

[optim]
warmup_steps = 5

[outer]
type = "diloco"
inner_steps = 8
"""

FED_ADAM = Path(__file__).resolve().parents[4] / "examples" / "fed_adam.py"


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "task.toml"
    path.write_text(FILE)
    return f"@{path}"


def one(options: CompareOptions, arm: int = 1, lr: float = 2e-3, seed: int = 0, start: str = "s") -> Trial:
    return trial(options, options.methods[arm], lr, seed, start=start)


def test_file_and_flags_give_the_comparison_with_flags_on_top(file: str) -> None:
    options = read_options([file, "--nodes", "2", "--lrs=4e-3,1e-3", "--train.batch-size", "6", "--seeds=3,5"])
    assert [arm.name for arm in options.methods] == ["ddp", "diloco:comm.codec=fp32"]
    assert (options.nodes, options.lrs, options.seeds, options.inner_steps) == (2, (1e-3, 4e-3), (3, 5), 8)
    assert read_options([file]).seeds == (0, 1)
    config = one(options).config
    assert (config.train.batch_size, config.train.total_steps, config.optim.warmup_steps) == (6, 80, 5)


def test_run_has_the_method_the_learning_rate_and_the_seed(file: str) -> None:
    made = one(read_options([file]), seed=7)
    assert made.config.outer is not None and made.config.outer.type == "diloco"
    assert (made.config.comm.codec, made.config.optim.adamw.lr, made.config.run.seed) == ("fp32", 2e-3, 7)
    assert made.config.ckpt.every_rounds == 2  # 10 rounds of 8 steps, 4 places
    assert (made.nodes, made.work, made.config.elastic.min_nodes) == (4, 4 * 80 * 4, 4)
    assert made.run_id.startswith("diloco-comm.codec-fp32-0.002-7-")
    alone = one(read_options([file, "--methods=single"]), arm=0)
    assert (alone.nodes, alone.config.outer, alone.config.ckpt.every_rounds) == (1, None, 20)


def test_batch_over_all_nodes_is_shared_among_those_of_each_method(file: str) -> None:
    options = read_options([file, "--methods=single,ddp,diloco:nodes=8", "--global-batch=16"])
    made = [one(options, arm=place) for place in range(3)]
    assert [(run.nodes, run.config.train.batch_size, run.work) for run in made] == [
        (1, 16, 16 * 80),
        (4, 4, 16 * 80),
        (8, 2, 16 * 80),
    ]


def test_committed_results_outlive_the_code(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [[file], [file, "--results=results/a"]]
    before = [one(read_options(arguments)).digest for arguments in asked]
    monkeypatch.setattr(trials, "code_digest", lambda: "another")
    after = [one(read_options(arguments)).digest for arguments in asked]
    assert before[0] != after[0] and before[1] == after[1]
    assert one(read_options(asked[1])).name == "diloco-comm.codec-fp32-lr-0.002-seed-0"


def test_digest_follows_the_content_of_an_algorithms_file(file: str, tmp_path: Path) -> None:
    path = tmp_path / "algorithm.py"
    digests: list[str] = []
    for source in (FED_ADAM.read_text(), f"{FED_ADAM.read_text()}# another\n", FED_ADAM.read_text()):
        path.write_text(source)
        digests.append(one(read_options([file, f"--methods=custom:algorithm={path}"]), arm=0).digest)
    assert digests[0] == digests[2] != digests[1]


def test_digest_follows_what_the_outcome_depends_on_and_nothing_else(file: str) -> None:
    options = read_options([file])
    same = read_options([file, "--out=elsewhere", "--link=1mbit,1ms", "--limit-minutes=5", "--run.dir=elsewhere"])
    assert one(same).digest == one(options).digest
    others = [
        one(options, lr=1e-3),
        one(options, seed=1),
        one(options, start="other"),
        one(options, arm=0),
        one(read_options([file, "--nodes=2"])),
        one(read_options([file, "--samples=100"])),
        one(read_options([file, "--inner-steps=4"])),
        one(read_options([file, "--train.total-steps=81"])),
    ]
    assert len({one(options).digest, *(other.digest for other in others)}) == 9


def test_common_start_is_one_node_with_the_batch_of_all(file: str) -> None:
    arguments, digest = warm_up(read_options([file, "--warm-lr=5e-3"]))
    assert "--train.batch-size=16" in arguments and "--optim.adamw.lr=0.005" in arguments
    assert digest == warm_up(read_options([file, "--warm-lr=5e-3", "--methods=demo", "--seeds=1"]))[1]
    assert digest != warm_up(read_options([file]))[1]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--methods=ddp:nodes=0"], "nodes is a number from 1 on"),
        (["--methods=single,ddp:nodes=3", "--global-batch=8"], "global_batch=8 is no multiple of the 3 nodes of ddp"),
        (["--methods=ddp", "--nodes=x"], r"compare\.nodes='x'"),
        (["--methods=ddp", "--points=0"], "greater than 0"),
        (["--methods=ddp", "--lrs=1,2,3", "--tries=2"], "below the 3 learning rates"),
        (["--methods=ddp", "--lrs=0,1"], "greater than 0"),
        (["--methods=ddp", "--seeds=1,1"], "give one or more distinct seeds"),
        (["--methods=ddp", "--seeds=0"], "give one or more distinct seeds"),
        (["--methods=ddp", "--link=fast"], "like 100mbit,80ms"),
        (["--methods=ddp", "--link=100,80ms"], "--link: '100' is not a rate"),
        (["--methods=ddp", "--outer.inner-steps=3"], "give settings of a method after its name"),
        (["--methods=ddp", "--train.total-stps=3"], "unknown key"),
        (["--seeds=2"], "--methods is missing"),
        (["@nowhere.toml", "--methods=ddp"], "nowhere.toml"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_options(arguments)


def test_unknown_key_of_the_table_is_refused_with_those_there_are(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[compare]\nmethods = ["ddp"]\nsead = 3\n')
    with pytest.raises(ConfigError, match=r"no key sead; known: claims, global_batch, inner_steps"):
        read_options([f"@{tmp_path / 'a.toml'}"])


def test_link_is_read_as_rate_and_round_trip() -> None:
    link = parse_link("100mbit, 80ms")
    assert (link.up_bytes_per_s, link.down_bytes_per_s, link.rtt_s) == (12.5e6, 12.5e6, 0.08)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiment_is_complete_and_its_claims_are_about_its_methods(path: Path) -> None:
    before = ["@" + str(path.with_name("curve.toml"))] if path.stem.startswith("curve-") else []
    options = read_options([*before, f"@{path}"])
    names = {arm.name for arm in options.methods}
    for claim in options.claims:
        for name in filter(None, (claim.of, claim.over, claim.to)):
            assert any(fnmatchcase(arm, name) for arm in names), claim
    for arm in options.methods:
        assert trial(options, arm, options.lrs[0], 0, start="").config.model.d_model <= 128
    assert path.read_text().startswith("# ")
    assert len(EXPERIMENTS) >= 4
