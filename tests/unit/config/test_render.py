"""A configuration as TOML, and the schema as help."""

from __future__ import annotations

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.config.conftest import STORE, Write

from zeroband.config import RunConfig, load_config
from zeroband.config.data import DataConfig, TextSource
from zeroband.config.keys import dotted, schema_keys
from zeroband.config.optim import AdamWConfig, OptimConfig
from zeroband.config.render import help_text, render_toml
from zeroband.config.schema import ObserveConfig

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
CHANGED = [
    ("--optim.clip_norm", "none", "--optim.schedule.type", "wsd", "--model.n_kv_heads", "2", "--observe.wandb", "{}"),
    ("--outer.type=diloco", "--outer.optimizer.momentum=0", "--outer.optimizer.lr=1", "--run.token=hunter2"),
    ("--outer.type=diloco", "--outer.inner_seconds", "60", "--outer.straggler_deadline_s", "5"),
    ("--fault.detect_s", "0.7"),
    ("--fault.detect_s", "33.3", "--fault.watch_s", "1", "--fault.hung_s", "40", "--fault.gloo_timeout_s", "50"),
    ("--fault.lease_s", "3.3"),
    ("--outer.type=ddp", "--fault.inject", "opened@3=SIGKILL,voted@4=SIGSTOP", "--data.source.paths", "a b,c"),
    (
        "--data.sources",
        '[{"name": "a", "weight": 0.7, "source": {"type": "jsonl", "paths": ["x", "y"]}},'
        ' {"name": "b", "weight": 1, "max_passes": 2, "source": {"type": "tokens", "path": "s3://b/c"}}]',
        "--data.phases",
        '[{"from_tokens": 5, "weights": {"a": 1, "b": 0}}]',
    ),
]


@pytest.mark.parametrize("argv", CHANGED)
def test_rendered_configuration_loads_again_without_its_secrets(argv: tuple[str, ...], write: Write) -> None:
    secrets = STORE | {"ZERO_BAND_RUN__TOKEN": "hunter2"} if any("--outer.type" in flag for flag in argv) else {}
    config = load_config(argv, secrets)
    assert load_config([write("again.toml", render_toml(config))], secrets) == config


def test_rendered_configuration_shows_no_secret_and_says_how_to_set_it() -> None:
    config = load_config(
        ["--outer.type", "ddp", "--run.token", "hunter2"], {"ZERO_BAND_STORE__URL": "redis://:hunter3@h"}
    )
    text = render_toml(config)
    assert "hunter" not in text
    assert '# url = "**********"  # a secret; set it again as ZERO_BAND_STORE__URL' in text


@given(text=TEXT.filter(bool), lr=st.floats(1e-30, 1e30), paths=st.lists(TEXT))
def test_rendered_values_are_read_back_as_they_were(text: str, lr: float, paths: list[str]) -> None:
    config = RunConfig(
        observe=ObserveConfig(sample_prompt=text),
        optim=OptimConfig(adamw=AdamWConfig(lr=lr)),
        data=DataConfig(source=TextSource(paths=tuple(paths))),
    )
    read = tomli.loads(render_toml(config))
    assert (read["observe"]["sample_prompt"], read["optim"]["adamw"]["lr"]) == (text, lr)
    assert read["data"]["source"]["paths"] == paths


def test_help_has_every_key_its_meaning_and_every_section() -> None:
    schema, text = schema_keys(), " ".join(help_text().split())
    assert [path for path in schema.keys if f"--{dotted(path)} " not in text] == []
    assert [path for path in schema.sections if f"[{dotted(path)}]" not in text] == []
    docs = [key.meaning for keys in schema.keys.values() for key in keys if key.path[-1] != "type"]
    assert [doc for doc in docs if not doc or " ".join(doc.split()) not in text] == []


@pytest.mark.parametrize(
    "line",
    [
        "--train.micro_bs * integer > 0 Sequences",
        "--model.n_kv_heads integer > 0 or none model.type = llama: Key",
        "--fault.detect_s number >= 0.5, <= 600 Longest",
        "--fault.lease_s number > 0 or none Lifetime of a lease",
        "--fault.grace_s * number > 0 Longest wait of a leaving node",
        "--outer.inner_steps * integer > 0 or none",
        "--outer.inner_seconds number > 0 or none",
        "--optim.adamw.betas list of number, 2 of them Decay",
        "--train.dtype * bfloat16 | float32 Compute",
        "--store.url * secret or none Address of the run's Redis",
        "--outer.type ddp | diloco | demo | sparseloco | custom Selects the keys of this section. (required",
        "optim.schedule.type = linear | wsd: Final learning rate as a fraction of the peak. (default: 0.0)",
        "data.source.type = jsonl: Files, globs or fsspec URLs of JSON Lines",
    ],
)
def test_help_gives_types_bounds_and_variants(line: str) -> None:
    assert line in " ".join(help_text().split())
