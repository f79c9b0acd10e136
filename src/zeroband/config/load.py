"""Loads one frozen configuration from TOML files, environment and flags; the last one wins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import NoneType

from pydantic import ValidationError

from zeroband.config.keys import Path, schema_keys
from zeroband.config.model import TransformersConfig
from zeroband.config.problems import describe
from zeroband.config.render import help_text, render_toml
from zeroband.config.schema import RunConfig
from zeroband.config.section import TAG
from zeroband.config.sources import Settings, SettingsSource, Text, TomlFile, config_file, variables
from zeroband.config.token_file import read_token
from zeroband.errors import ConfigError

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
    over: Sequence[SettingsSource] = (),
) -> RunConfig:
    """Load the configuration from the arguments and the environment.

    `defaults`: flags instead of the schema's defaults. `over`: sources that override the arguments; flags may set keys
    of their types that they leave open.

    `--help` and `--dry-run` print and end the process (SystemExit 0); of several local ranks, only the first prints.
    Raises ConfigError with one line per problem.
    """
    environ = os.environ if environ is None else environ
    line = _parse(argv)
    if line.wants_help:
        _print_and_exit(help_text(), environ)
    weakest = _types_first(_parse(defaults).flags)
    files = [TomlFile(file) for file in line.files]
    settings = Settings([*weakest, *files, *_types_first(variables(environ)), *over, *_types_first(line.flags), *over])
    try:
        config = RunConfig.model_validate(settings.values)
    except ValidationError as error:
        raise ConfigError(describe(error, settings)) from None
    config = _with_models_tokenizer(_with_token(config))
    if line.is_dry_run:
        _print_and_exit(render_toml(config), environ)
    return config


def given_settings(argv: Sequence[str], environ: Mapping[str, str], *, with_files: bool = True) -> Settings:
    """Return what the arguments and the environment set, before validation. Raises ConfigError."""
    line = _parse(argv)
    files = [TomlFile(file) for file in line.files] if with_files else []
    return Settings([*files, *_types_first(variables(environ)), *_types_first(line.flags)])


def require_asked(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError if neither a file nor a key that says what to train is given."""
    line = _parse(argv)
    given = [*variables(os.environ if environ is None else environ), *line.flags]
    if not line.files and not any(text.path[0] in _WHAT_TO_TRAIN for text in given):
        raise ConfigError(_HOW_TO_BEGIN)


def _types_first(texts: Iterable[Text]) -> list[Text]:
    """Sort the types of sections before their keys."""
    return sorted(texts, key=lambda text: text.path[-1] != TAG)


def _with_token(config: RunConfig) -> RunConfig:
    """Read run.token_file, if set. Raises ConfigError."""
    if config.run.token_file is None:
        return config
    token = read_token(config.run.token_file)
    return config.model_copy(update={"run": config.run.model_copy(update={"token": token})})


def _with_models_tokenizer(config: RunConfig) -> RunConfig:
    """Use the tokenizer of model.name unless data.tokenizer is set."""
    model = config.model
    if not isinstance(model, TransformersConfig) or model.name is None or "tokenizer" in config.data.model_fields_set:
        return config
    folder = FilePath(model.name)
    name = (
        str(folder.absolute()) if folder.is_dir() else model.name
    )  # another process may have another working directory
    return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": name})})


def _print_and_exit(text: str, environ: Mapping[str, str]) -> None:
    if environ.get("LOCAL_RANK", "0") == "0":
        print(text, end="")
    raise SystemExit(0)


# -- the command line ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CommandLine:
    """The parsed arguments, in order."""

    files: list[FilePath]
    flags: list[Text]
    wants_help: bool
    is_dry_run: bool


def _parse(argv: Sequence[str]) -> _CommandLine:
    """Parse the arguments. Raises ConfigError for one that is no `@file`, `@preset` or flag with its value."""
    files: list[FilePath] = []
    flags: list[Text] = []
    switches: set[str] = set()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help", "--dry-run"):
            switches.add(argument)
        elif argument.startswith("@"):
            files.append(config_file(argument[1:] or _next(rest, "@", "the name of a TOML file or of a preset")))
        elif argument.startswith("--"):
            flags.append(_flag(argument, rest))
        else:
            raise ConfigError(_unexpected(argument))
    return _CommandLine(files, flags, bool(switches & {"-h", "--help"}), "--dry-run" in switches)


def _flag(argument: str, rest: list[str]) -> Text:
    """Parse a flag; its value may be the next argument, and is optional for booleans and sections that are off."""
    schema = schema_keys()
    written, equals, value = argument.partition("=")
    path, is_negated = _path_of(written)
    is_boolean = bool in schema.kinds(path)
    alone = str(not is_negated).lower() if is_boolean else "{}" if _is_switch(path) else None
    if is_negated and path in schema and (equals or not is_boolean):
        raise ConfigError(f"{written}: only a boolean key can be negated, and without a value")
    may_stand_alone = alone is not None or path not in schema
    if not equals and (is_negated or (may_stand_alone and _is_next_an_option(rest))):
        value = alone or ""
    elif not equals:
        value = _next(rest, written, f"a value; {written}=VALUE gives one that begins with -- or @")
    return Text(path, value, written)


def _is_switch(path: Path) -> bool:
    """Whether a bare section name switches it on with its defaults."""
    section = schema_keys().sections.get(path)
    return section is not None and NoneType in section.kinds and set(section.variants) == {""}


def _is_next_an_option(rest: Sequence[str]) -> bool:
    return not rest or rest[0].startswith(("--", "@"))


def _next(rest: list[str], after: str, what: str) -> str:
    if _is_next_an_option(rest):
        raise ConfigError(f"{after} needs {what}")
    return rest.pop(0)


def _path_of(flag: str) -> tuple[Path, bool]:
    """Return the key of a flag, and whether the flag negates it."""
    name = flag.removeprefix("--").replace("-", "_")
    return tuple(name.removeprefix("no_").split(".")), name.startswith("no_")


def _unexpected(argument: str) -> str:
    """Return the error for an argument that is neither a file nor a flag."""
    name = argument.lstrip("-")
    if _path_of(name.partition("=")[0])[0] in schema_keys():
        return f"unexpected argument {argument!r}: did you mean --{name}?"
    return f"unexpected argument {argument!r}: a file is given as @{argument}, a value as --key value"
