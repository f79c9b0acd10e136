"""Loads one frozen configuration: TOML files, then environment, then flags; the last one wins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from zeroband.config.command_line import CommandLine, parse_command_line
from zeroband.config.keys import SchemaKeys, schema_keys
from zeroband.config.model import TransformersConfig
from zeroband.config.problems import describe
from zeroband.config.render import help_text, render_toml
from zeroband.config.schema import RunConfig
from zeroband.config.section import TAG
from zeroband.config.shared import shared_digest, shared_items
from zeroband.config.sources import Settings, Source, Text, TomlFile, variables
from zeroband.config.token_file import read_token
from zeroband.errors import ConfigError

__all__ = ["load_config", "render_toml", "require_asked", "shared_digest", "shared_items"]

_WHAT_TO_TRAIN = ("model", "data", "train", "optim", "outer")

_HOW_TO_BEGIN = """\
nothing to train: no configuration was given. To begin, name one, or give its keys:
  zeroband train @debug/normal              a preset; also 14M, 150M, 1B, 10B and others, or a @FILE.toml of your own
  zeroband train --train.dtype float32 --train.total-steps 100 --train.batch-size 8 --train.micro-bs 8 \\
      --data.seq-length 128 --model.d-model 64 --model.n-layers 2 --optim.warmup-steps 10
                                            a small model on a CPU, of the sources of Python's standard library
  zeroband train --help                     every key, with its type, default and meaning
  zeroband demo                             four nodes on this machine, in a clone of the repository"""


def load_config(
    argv: Sequence[str],
    environ: Mapping[str, str] | None = None,
    *,
    defaults: Sequence[str] = (),
    over: Sequence[Source] = (),
) -> RunConfig:
    """The configuration that the arguments, and the environment below them, ask for.

    `defaults`: flags that hold where neither says otherwise, in the place of the schema's. `over`: what holds whatever
    they say; keys of its types that it leaves open may be given by flags.
    `--help` and `--dry-run` print and end the process (SystemExit 0); of several local ranks, the first one prints.
    Raises: ConfigError with a line for each thing that is wrong.
    """
    environ = os.environ if environ is None else environ
    schema = schema_keys()
    line = parse_command_line(argv, schema)
    if line.wants_help:
        _print_and_exit(help_text(schema), environ)
    weakest = _texts(parse_command_line(defaults, schema).flags)
    settings = Settings([*weakest, *_sources(line, environ, schema, over), *over], schema)
    try:
        config = RunConfig.model_validate(settings.values)
    except ValidationError as error:
        raise ConfigError(describe(error, settings, schema)) from None
    config = _with_models_tokenizer(_with_token(config))
    if line.is_dry_run:
        _print_and_exit(render_toml(config), environ)
    return config


def given_settings(argv: Sequence[str], environ: Mapping[str, str], *, with_files: bool = True) -> Settings:
    """What the arguments, and the environment below them, set; not validated yet. Raises ConfigError."""
    schema = schema_keys()
    line = parse_command_line(argv, schema)
    return Settings(_sources(line if with_files else replace(line, files=()), environ, schema), schema)


def _sources(
    line: CommandLine, environ: Mapping[str, str], schema: SchemaKeys, types: Sequence[Source] = ()
) -> list[Source]:
    """The weakest first. `types`: sources whose types the flags go by."""
    files = [TomlFile(file, schema) for file in line.files]
    return [*files, *_texts(variables(environ)), *types, *_texts(line.flags)]


def _texts(texts: Iterable[Text]) -> list[Text]:
    """A new type of a section before its keys."""
    return sorted(texts, key=lambda text: text.path[-1] != TAG)


def _with_token(config: RunConfig) -> RunConfig:
    """The configuration with the token that its file holds. Raises ConfigError."""
    if config.run.token_file is None:
        return config
    token = read_token(config.run.token_file)
    return config.model_copy(update={"run": config.run.model_copy(update={"token": token})})


def _with_models_tokenizer(config: RunConfig) -> RunConfig:
    """The configuration with the tokenizer that comes with its model, where no other one is named."""
    model = config.model
    if not isinstance(model, TransformersConfig) or model.name is None or "tokenizer" in config.data.model_fields_set:
        return config
    name = str(Path(model.name).absolute()) if Path(model.name).is_dir() else model.name  # it is opened elsewhere, too
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": name})})


def require_asked(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError where neither a file nor a key that says what to train was given: nobody asked for a run."""
    schema = schema_keys()
    line = parse_command_line(argv, schema)
    given = [*variables(os.environ if environ is None else environ), *line.flags]
    if not line.files and not any(text.path[0] in _WHAT_TO_TRAIN for text in given):
        raise ConfigError(_HOW_TO_BEGIN)


def _print_and_exit(text: str, environ: Mapping[str, str]) -> None:
    if environ.get("LOCAL_RANK", "0") == "0":
        print(text, end="")
    raise SystemExit(0)
