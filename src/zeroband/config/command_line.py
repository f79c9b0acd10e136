"""The command line of a run in its parts: files, flags, and what is asked instead of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from types import NoneType

from zeroband.config.keys import Path, SchemaKeys
from zeroband.config.presets import config_file
from zeroband.config.sources import Text
from zeroband.errors import ConfigError


@dataclass(frozen=True)
class CommandLine:
    """The parts, in the order in which they were given."""

    files: tuple[FilePath, ...]
    flags: tuple[Text, ...]
    wants_help: bool
    is_dry_run: bool


def parse_command_line(argv: Sequence[str], schema: SchemaKeys) -> CommandLine:
    """Take the arguments apart. Raises ConfigError for one that is no `@file`, `@preset` or flag with its value."""
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
            flags.append(_flag(argument, rest, schema))
        else:
            raise ConfigError(_unexpected(argument, schema))
    return CommandLine(tuple(files), tuple(flags), bool(switches & {"-h", "--help"}), "--dry-run" in switches)


def _flag(argument: str, rest: list[str], schema: SchemaKeys) -> Text:
    """A flag with its value, which may be the next argument; that of a boolean or of a section that is off may lack."""
    written, equals, value = argument.partition("=")
    path, is_negated = _path_of(written)
    is_boolean = bool in schema.kinds(path)
    alone = str(not is_negated).lower() if is_boolean else "{}" if _is_switch(path, schema) else None
    if is_negated and path in schema and (equals or not is_boolean):
        raise ConfigError(f"{written}: only a boolean key can be negated, and without a value")
    may_stand_alone = alone is not None or path not in schema
    if not equals and (is_negated or (may_stand_alone and _is_next_an_option(rest))):
        value = alone or ""
    elif not equals:
        value = _next(rest, written, f"a value; {written}=VALUE gives one that begins with -- or @")
    return Text(path, value, written)


def _is_switch(path: Path, schema: SchemaKeys) -> bool:
    """Whether the name of a section alone switches it on, with its defaults."""
    section = schema.sections.get(path)
    return section is not None and NoneType in section.kinds and set(section.variants) == {""}


def _is_next_an_option(rest: Sequence[str]) -> bool:
    return not rest or rest[0].startswith(("--", "@"))


def _next(rest: list[str], after: str, what: str) -> str:
    if _is_next_an_option(rest):
        raise ConfigError(f"{after} needs {what}")
    return rest.pop(0)


def _path_of(flag: str) -> tuple[Path, bool]:
    """The key that a flag names, and whether the flag says no to it."""
    name = flag.removeprefix("--").replace("-", "_")
    return tuple(name.removeprefix("no_").split(".")), name.startswith("no_")


def _unexpected(argument: str, schema: SchemaKeys) -> str:
    """What to say of an argument that is neither a file nor a flag."""
    name = argument.lstrip("-")
    if _path_of(name.partition("=")[0])[0] in schema:
        return f"unexpected argument {argument!r}: did you mean --{name}?"
    return f"unexpected argument {argument!r}: a file is given as @{argument}, a value as --key value"
