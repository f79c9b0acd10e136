"""Which value wins, and what a user who made a mistake gets to read."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.unit.config.conftest import STORE, Load, Refusal, Write

from zeroband.config import RunConfig, load_config
from zeroband.config.load import render_toml, require_asked
from zeroband.config.model import TransformersConfig
from zeroband.config.optim import CosineSchedule, WarmupStableDecaySchedule
from zeroband.config.outer import DilocoConfig
from zeroband.config.schema import ResumeConfig, RollbackConfig, WandbConfig
from zeroband.errors import ConfigError

WSD = 'optim.schedule = { decay_ratio = 0.5, final_ratio = 0.25, type = "wsd" }'
MICRO, COMPILE, BETAS, OUTER = "train.micro_bs", "train.compile", "optim.adamw.betas", "outer"
FILES = [
    (["\ufefftrain.micro_bs = 3\r\n"], "", {}, MICRO, 3),  # some editors begin a file so
    (["[train]\nmicro_bs = 1\nbatch_size = 2", "[train]\nmicro_bs = 3"], "", {}, MICRO, 3),
    (["[train]\nmicro_bs = 1\nbatch_size = 2", "[train]\nmicro_bs = 3"], "", {}, "train.batch_size", 2),
    (["train.micro_bs = 1"], "", {"ZERO_BAND_TRAIN__MICRO_BS": "2"}, MICRO, 2),
    (["train.micro_bs = 1"], "--train.micro_bs 3", {"ZERO_BAND_TRAIN__MICRO_BS": "2"}, MICRO, 3),
    (["fault.store_s = 7200"], "", {"ZERO_BAND_FAULT__DETECT_S": "60"}, "fault.time_outs.lease_s", 60.0),
    (["fault.store_s = 7200"], "", {"ZERO_BAND_FAULT__DETECT_S": "60"}, "fault.time_outs.store_s", 7200.0),
]
WORDS = [
    ([], "--train.micro-bs 4", {}, MICRO, 4),
    ([], "--train.micro_bs=4", {}, MICRO, 4),
    ([], "--train '{\"micro_bs\": 4}'", {}, MICRO, 4),
    ([], "--train.micro_bs 4 --train.micro_bs=5", {}, MICRO, 5),
    ([], "", {"Zero_Band_Train__Micro_Bs": "9", "ZEROBAND_OTHER": "1"}, MICRO, 9),
    ([], "", {"zero_band_log_level": "DEBUG"}, "log_level", "DEBUG"),
    ([], "--train.compile", {}, COMPILE, True),
    ([], "--train.compile --run.seed 1", {}, COMPILE, True),
    (["train.compile = true"], "--train.compile false", {}, COMPILE, False),
    (["train.compile = true"], "--train.compile=false", {}, COMPILE, False),
    (["train.compile = true"], "--no-train.compile", {}, COMPILE, False),
    ([], "--optim.adamw.betas 0.8,0.9", {}, BETAS, (0.8, 0.9)),
    ([], "--optim.adamw.betas '[0.8, 0.9]'", {}, BETAS, (0.8, 0.9)),
    ([], "", {"ZERO_BAND_OPTIM__ADAMW__BETAS": "0.8, 0.9"}, BETAS, (0.8, 0.9)),
    (['fault.inject = ["opened@3=SIGKILL"]'], "--fault.inject=", {}, "fault.inject", ()),
    ([], "--store.url nodes --store.peers a:6379,a:6379 --outer.type ddp", {}, "store.address", "nodes://a:6379"),
    ([], "--model.type transformers --model.name some/model", {}, "data.tokenizer", "some/model"),
    ([], "--model.type transformers --model.name m --data.tokenizer byte", {}, "data.tokenizer", "byte"),
    ([], '--model.type transformers --model.config \'{"model_type": "qwen3"}\'', {}, "data.tokenizer", "byte"),
]
OFF_AND_ON = [
    ([], "--optim.clip-norm none", {}, "optim.clip_norm", None),
    ([], "", {"ZERO_BAND_OPTIM__CLIP_NORM": "None"}, "optim.clip_norm", None),
    (['optim.clip_norm = "none"'], "", {}, "optim.clip_norm", None),
    ([], "--run.id none", {}, "run.id", "none"),  # which must have one
    (['[outer]\ntype = "diloco"'], "--outer none", {}, OUTER, None),
    (
        ['[outer]\ntype = "diloco"\ninner_steps = 7'],
        *("--outer.type diloco", STORE | {"ZERO_BAND_OUTER": "none"}, OUTER, DilocoConfig(type="diloco")),
    ),
    ([], "", {}, "observe.wandb", None),
    (["[observe.wandb]"], "", {}, "observe.wandb", WandbConfig()),
    ([], "--resume", {}, "resume", ResumeConfig()),
    ([], "--resume --resume.step 7", {}, "resume", ResumeConfig(step=7)),
    ([], "--resume.path x/run --resume", {}, "resume", ResumeConfig(path="x/run")),
    ([], "--resume --resume none", {}, "resume", None),
    ([], "--rollback.most 4 --outer.type ddp --ckpt.path x", STORE, "rollback", RollbackConfig(most=4)),
]
TYPES = [  # a section that changes its type drops the keys of the type before
    ([WSD], "", {}, "optim.schedule", WarmupStableDecaySchedule(type="wsd", decay_ratio=0.5, final_ratio=0.25)),
    ([WSD], "--optim.schedule.type cosine", {}, "optim.schedule", CosineSchedule(final_ratio=0.1)),
    ([WSD], "--optim.schedule.final-ratio 0.3 --optim.schedule.type wsd", {}, "optim.schedule.decay_ratio", 0.5),
    (["optim.schedule.final_ratio = 0.3"], "", {}, "optim.schedule", CosineSchedule(final_ratio=0.3)),
    (["optim.schedule.final_ratio = 0.3"], "--optim.schedule.type cosine", {}, "optim.schedule.final_ratio", 0.3),
    (
        [],
        "--data.source.paths a,b --data.source.type parquet",
        {},
        "data.source.paths",
        ("a", "b"),
    ),
]


def test_load_config_without_arguments_gives_the_defaults(load: Load) -> None:
    assert load() == RunConfig()


@pytest.mark.parametrize(("files", "flags", "environ", "key", "expected"), [*FILES, *WORDS, *OFF_AND_ON, *TYPES])
def test_value_that_wins(
    load: Load, write: Write, files: list[str], flags: str, environ: dict[str, str], key: str, expected: object
) -> None:
    value: object = load(*(write(f"{n}.toml", text) for n, text in enumerate(files)), *shlex.split(flags), **environ)
    for name in key.split("."):
        value = getattr(value, name)
    assert value == expected


def test_flag_that_stands_alone_may_be_followed_by_a_file(load: Load, write: Write) -> None:
    assert load("--train.compile", write("a.toml", "run.seed = 5")).train.compile is True


@pytest.mark.parametrize("text", ["a = " + "7" * 5000, "a = " + "[" * 5000 + "]" * 5000, "\ufeff\ufeffa = 1"])
def test_what_pythons_parser_fails_on_is_no_valid_toml(load: Load, tmp_path: Path, text: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=r"a\.toml is no valid TOML: "):
        load(f"@{tmp_path / 'a.toml'}")


def test_files_are_given_with_and_without_a_space_after_the_at_sign(load: Load, write: Write) -> None:
    first, second = write("a.toml", "run.seed = 5\n"), write("b.toml", "train.micro_bs = 6\n")
    config = load("@", first[1:], second)
    assert (config.run.seed, config.train.micro_bs) == (5, 6)


def test_environment_is_that_of_the_process_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZERO_BAND_RUN__SEED", "77")
    assert load_config([]).run.seed == 77
    assert load_config([], {}).run.seed == 0


def test_unknown_keys_are_refused_wherever_they_are_written(refusal: Refusal, write: Write) -> None:
    file = write("a.toml", "[train]\nmicro_batch = 1\n")
    expected = "unknown key train.micro_batch (from {}): did you mean train.micro_bs?"
    assert refusal(file) == expected.format(file[1:])
    assert refusal(ZERO_BAND_TRAIN__MICRO_BATCH="1") == expected.format("ZERO_BAND_TRAIN__MICRO_BATCH")
    assert refusal("--train.micro-batch", "1") == expected.format("--train.micro-batch")


def test_all_unknown_keys_are_named_at_once(refusal: Refusal, write: Write) -> None:
    file = write("a.toml", "sed = 1\n[modle]\nd_model = 1\n")
    message = refusal(file, "--no-run.sd", "--train", '{"lr": 1}', ZERO_BAND_X__Y="1", ZERO_BAND_DATA__SOURCES__A="1")
    unknown = ["sed", "modle", "data.sources.a", "x.y", "run.sd", "train.lr"]
    assert [line.split(" (")[0] for line in message.splitlines()] == [f"unknown key {key}" for key in unknown]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--train.micro_bs", "0"], "train.micro_bs='0' (from --train.micro_bs): input should be greater than 0"),
        (["--train.compile", "maybe"], "train.compile='maybe' (from --train.compile): input should be a valid boolean"),
        (["--optim.adamw.lr", "inf"], "optim.adamw.lr='inf' (from --optim.adamw.lr): input should be a finite number"),
        (["--optim.adamw.betas", "0.9,x"], "optim.adamw.betas[1]='x' (from --optim.adamw.betas): input should be a"),
        (["--optim.adamw.betas", "[0.9"], "optim.adamw.betas='[0.9' (from --optim.adamw.betas): not a JSON list"),
        (["--train.dtype", "fp8"], "train.dtype='fp8' (from --train.dtype): input should be 'bfloat16' or 'float32'"),
        (["--outer.type", "dilco"], 'outer.type=\'dilco\' (from --outer.type); allowed: "ddp", "diloco"'),
        (["--outer.inner_steps", "5"], 'outer.type is missing; allowed: "ddp", "diloco"'),
        (["--data.source.type", "jsonl"], 'data.source.paths is missing; data.source.type="jsonl" needs it'),
        (["--train", "4"], "train='4' (from --train): train is a section; set its keys, such as train.KEY"),
        (["--outer", "null"], "outer='null' (from --outer): outer is a section; set its keys, such as outer.type"),
        (["--model.n_heads", "3"], "model.d_model=256 is not a multiple of model.n_heads=3"),
        (["--train.micro_bs"], "--train.micro_bs needs a value"),
        (["--train.micro_bs", "--run.seed=1"], "--train.micro_bs needs a value"),
        (["--no-train.micro_bs"], "--no-train.micro_bs: only a boolean key can be negated"),
        (["--no-train.compile=true"], "--no-train.compile: only a boolean key can be negated"),
        (["a.toml"], "unexpected argument 'a.toml': a file is given as @a.toml"),
        (["-train.micro_bs", "4"], "unexpected argument '-train.micro_bs': did you mean --train.micro_bs?"),
        (["train.micro_bs=4"], "unexpected argument 'train.micro_bs=4': did you mean --train.micro_bs=4?"),
        (["--outer", "diloco"], "outer='diloco' (from --outer): outer is a section; did you mean outer.type = "),
        (
            ["--train.lr", "3"],
            "unknown key train.lr (from --train.lr): did you mean outer.lr, optim",
        ),
        (["--diloco", "x"], 'unknown key diloco (from --diloco): did you mean outer.type="diloco"?'),
        (
            ["--run.id", "a b"],
            "run.id='a b' (from --run.id): a name is 1 to 64 letters",
        ),
        (["@"], "@ needs the name of a TOML file"),
        (["@/nowhere/a.toml"], "@/nowhere/a.toml: No such file or directory"),
    ],
)
def test_mistakes_are_refused_with_the_key_the_value_and_its_origin(
    refusal: Refusal, argv: list[str], message: str
) -> None:
    assert refusal(*argv).startswith(message)


@pytest.mark.parametrize("flag", ["--fault.detect_s=0.1", "--fault.detect_s=soon", "--fault.watch_s=0"])
def test_mistake_that_other_values_follow_from_is_named_alone(refusal: Refusal, flag: str) -> None:
    assert len(refusal(flag).splitlines()) == 1


def test_wrong_values_of_a_file_are_refused_with_the_file(refusal: Refusal, write: Write) -> None:
    file = write("a.toml", 'train = 4\nouter = "ddp"\n')
    assert refusal(file).splitlines() == [
        f"train=4 (from {file[1:]}): train is a section; set its keys, such as train.KEY",
        f"outer='ddp' (from {file[1:]}): outer is a section; did you mean outer.type = \"ddp\"?",
    ]


@pytest.mark.parametrize("text", [b"[train\n", b"run.id = \xff"])
def test_file_that_is_no_toml_is_refused_by_name(refusal: Refusal, tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.toml").write_bytes(text)
    assert refusal(f"@{tmp_path / 'a.toml'}").startswith(f"{tmp_path / 'a.toml'} is no valid TOML: ")


def test_syntax_error_of_a_file_comes_with_its_line_but_for_a_secret(refusal: Refusal, write: Write) -> None:
    assert refusal(write("a.toml", "[model]\nn_heads = 4,\n")).splitlines()[1:] == ["  n_heads = 4,", "             ^"]
    message = refusal(write("b.toml", '[run]\ntoken = "hunter2\n'))
    assert "at line 2" in message and "hunter2" not in message


def test_nobody_trains_by_defaults_alone_and_the_way_to_begin_that_is_shown_works() -> None:
    for argv, environ in ([], {}), (["--run.seed", "3"], {}), ([], {"ZERO_BAND_RUN__ID": "x"}):
        with pytest.raises(ConfigError, match="nothing to train: no configuration was given") as refused:
            require_asked(argv, environ)
    shown = str(refused.value).replace("\\\n", " ")
    (example,) = re.findall(r"zeroband train (--train.*)", shown)
    config = load_config(example.split(), {})
    require_asked(example.split(), {})
    assert (config.train.total_steps, config.model.d_model) == (100, 64)
    for argv, environ in (
        (["@a.toml"], {}),
        (["--train.total_steps", "3"], {}),
        ([], {"ZERO_BAND_MODEL__D_MODEL": "64"}),
    ):
        require_asked(argv, environ)


def test_file_that_is_not_there_comes_with_those_that_are(refusal: Refusal, tmp_path: Path) -> None:
    assert refusal(f"@{tmp_path}/one.toml").endswith(f"; there is no TOML file in {tmp_path}")
    (tmp_path / "once.toml").touch()
    assert refusal(f"@{tmp_path}/one.toml").endswith(f"; did you mean @{tmp_path}/once.toml?")
    assert refusal(f"@{tmp_path}/151M.toml").endswith(f"; in {tmp_path} there are once.toml")
    assert refusal(f"@{tmp_path}/150M.toml").endswith("; did you mean the preset @150M?")
    assert refusal(f"@{tmp_path}").endswith("Is a directory; name one of its files")


def test_key_of_another_type_is_refused_with_the_type_it_belongs_to(refusal: Refusal) -> None:
    message = refusal("--outer.type", "ddp", "--outer.inner_steps", "5", "--outer.optimizer.lr", "1", **STORE)
    rounds = ("diloco", "sparseloco", "custom")
    homes = (" or ".join(f'outer.type="{name}"' for name in rounds), 'outer.type="diloco"')
    keys = ("outer.inner_steps", "outer.optimizer.lr")
    assert message.splitlines() == [
        f'{key} (from --{key}) belongs to {home}; chosen is outer.type="ddp"'
        for key, home in zip(keys, homes, strict=True)
    ]


@pytest.mark.parametrize(
    ("argv", "environ"),
    [
        ((), {"ZERO_BAND_STORE": '{"url": "redis://:hunter2@host"'}),
        (("--store.url=redis://:hunter2@host", "--train.micro_bs", "0"), {}),
        (("--run.token=hunter2",), {"ZERO_BAND_RUN__SEED": "x"}),
    ],
)
def test_refusals_show_no_secret(refusal: Refusal, argv: tuple[str, ...], environ: dict[str, str]) -> None:
    assert "hunter2" not in refusal(*argv, **environ)


def test_section_that_holds_a_secret_is_not_shown_and_an_empty_secret_is_a_mistake(
    refusal: Refusal, write: Write
) -> None:
    message = refusal(write("a.toml", 'store = "redis://:hunter2@host"'))
    assert message.startswith("store=********** (from ") and "hunter2" not in message
    for key in ("ZERO_BAND_RUN__TOKEN", "ZERO_BAND_STORE__URL"):  # a variable that was not set
        assert key in refusal(**{key: ""})


@pytest.mark.parametrize("content", ["s3cret", "s3cret\n", "s3cret\r\n"])
def test_token_comes_from_its_file_without_the_end_of_the_line(load: Load, tmp_path: Path, content: str) -> None:
    file = _token_file(tmp_path, content)
    config = load("--run.token-file", str(file))
    assert config.run.token is not None and config.run.token.get_secret_value() == "s3cret"
    text = render_toml(config)
    assert "s3cret" not in text and str(file) in text
    again = tmp_path / "config.toml"
    again.write_text(text)
    assert load(f"@{again}").run == config.run


@pytest.mark.parametrize(
    ("content", "mode", "more", "said"),
    [
        ("", 0o600, {}, "is empty; one line with the token is needed"),
        ("\n", 0o600, {}, "is empty"),
        ("x" * 5000, 0o600, {}, "is longer than 4096 bytes"),
        ("s3cret", 0o606, {}, "is open to every user of this machine (mode 0606); chmod 600 it"),
        ("x", 0o600, {"ZERO_BAND_RUN__TOKEN": "y"}, "run.token and run.token_file are both set; drop one of them"),
        ("x", 0o600, {"ZERO_BAND_RUN__TOKEN_FILE": "/no"}, "run.token_file='/no' cannot be read: No such file"),
    ],
)
def test_token_file_that_cannot_be_right_is_refused(
    refusal: Refusal, tmp_path: Path, content: str, mode: int, more: dict[str, str], said: str
) -> None:
    file = _token_file(tmp_path, content)
    file.chmod(mode)
    assert said in refusal(**{"ZERO_BAND_RUN__TOKEN_FILE": str(file), **more})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")
@pytest.mark.parametrize(("owner", "is_refused"), [(65534, True), (0, False)])
def test_token_file_that_all_may_read_is_taken_from_root_only(
    load: Load, refusal: Refusal, tmp_path: Path, owner: int, is_refused: bool
) -> None:
    """Containers mount secrets as files of root's that all may read."""
    file = _token_file(tmp_path, "s3cret")
    file.chmod(0o644)
    os.chown(file, owner, owner)
    if is_refused:
        assert "mode 0644" in refusal("--run.token-file", str(file))
    else:
        assert load("--run.token-file", str(file)).run.token is not None


def _token_file(folder: Path, content: str) -> Path:
    file = folder / "token"
    file.write_bytes(content.encode())
    file.chmod(0o600)
    return file


def test_node_knows_its_own_store_after_those_that_it_was_told_of(load: Load) -> None:
    store = load("--outer.type=ddp", "--store.url=nodes", '--store.peers=["a", "b:6380"]').store
    assert store.are_of_nodes and store.are_several and store.address == "nodes://a,b:6380"
    assert store.with_peer("10.0.0.3:6379").address == "nodes://a,b:6380,10.0.0.3:6379"
    written_out = load("--outer.type=ddp", "--store.url=nodes://a,b:6380").store
    assert written_out.with_peer("10.0.0.3:6379").address == "nodes://a,b:6380,10.0.0.3:6379"


def test_configuration_is_frozen(load: Load) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().train.micro_bs = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_help_names_every_key_and_ends_the_process(load: Load, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--help", "--train.micro_bs", "0")
    assert ended.value.code == 0
    assert "--train.micro_bs" in capsys.readouterr().out


@pytest.mark.parametrize(("local_rank", "prints"), [("0", True), ("1", False)])
def test_dry_run_prints_on_the_first_local_rank_only(
    load: Load, capsys: pytest.CaptureFixture[str], local_rank: str, prints: bool
) -> None:
    with pytest.raises(SystemExit) as ended:
        load("--dry-run", "--run.seed", "8", LOCAL_RANK=local_rank)
    assert ended.value.code == 0
    assert ("seed = 8" in capsys.readouterr().out) is prints


def test_table_of_somebody_elses_keys_comes_from_files_and_flags_and_is_written_back(tmp_path: Path) -> None:
    file, again = tmp_path / "a.toml", tmp_path / "b.toml"
    file.write_text('[model]\ntype = "transformers"\n[model.config]\nmodel_type = "qwen3"\nsizes = [1, 2]\na.b = 0.5\n')
    config = load_config([f"@{file}"], {})
    assert isinstance(config.model, TransformersConfig)
    assert config.model.config == {"model_type": "qwen3", "sizes": [1, 2], "a": {"b": 0.5}}
    again.write_text(render_toml(config))
    assert load_config([f"@{again}"], {}) == config
    flagged = load_config([f"@{file}", "--model.config", '{"model_type": "llama"}'], {})
    assert isinstance(flagged.model, TransformersConfig) and flagged.model.config == {"model_type": "llama"}
    with pytest.raises(ConfigError, match=r"model\.config='qwen3' .*not a JSON object"):
        load_config([f"@{file}", "--model.config", "qwen3"], {})
