"""Where settings come from: TOML files, environment, flags; each becomes a layer of settings that know their origin."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import Any, cast

from zeroband.config.keys import TAG, Path, SchemaKeys, dotted
from zeroband.config.presets import config_file, preset_names
from zeroband.errors import ConfigError

ENV_PREFIX = "ZERO_BAND_"
ENV_DELIMITER = "__"
NONE = "none"
"""How files, environment and flags write "off" or "not set", which TOML has no value for."""


@dataclass(frozen=True)
class Setting:
    """A value for one key, or for a whole section: None, or an empty table."""

    path: Path
    value: Any
    origin: str
    """Where the user wrote it: a file, a variable or a flag."""


@dataclass(frozen=True)
class CommandLine:
    """The command line in its parts."""

    files: tuple[FilePath, ...]
    flags: tuple[tuple[str, str | None], ...]
    """(as it was written, value); None where the flag stands alone."""
    wants_help: bool
    is_dry_run: bool


def parse_command_line(argv: Sequence[str], schema: SchemaKeys) -> CommandLine:
    """Take the arguments apart. Raises ConfigError for one that is no `@file`, `@preset` or flag with its value."""
    files: list[FilePath] = []
    flags: list[tuple[str, str | None]] = []
    switches: set[str] = set()
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument in ("-h", "--help", "--dry-run"):
            switches.add(argument)
        elif argument.startswith("@"):
            files.append(config_file(argument[1:] or _next(rest, "@", "the name of a TOML file or of a preset")))
        elif argument.startswith("--"):
            flag, equals, value = argument.partition("=")
            flags.append((flag, value if equals else _value_after(flag, rest, schema)))
        else:
            raise ConfigError(_unexpected(argument, schema))
    return CommandLine(tuple(files), tuple(flags), bool(switches & {"-h", "--help"}), "--dry-run" in switches)


def _unexpected(argument: str, schema: SchemaKeys) -> str:
    """What to say of an argument that is neither a file nor a flag."""
    name = argument.lstrip("-")
    if _path_of_flag(name.partition("=")[0])[0] in schema:
        return f"unexpected argument {argument!r}: did you mean --{name}?"
    return f"unexpected argument {argument!r}: a file is given as @{argument}, a value as --key value"


def _value_after(flag: str, rest: list[str], schema: SchemaKeys) -> str | None:
    """The value that follows a flag. One of a boolean may stand alone, of a section that is off, and of no key."""
    path, is_negated = _path_of_flag(flag)
    may_stand_alone = path not in schema or any(key.is_flag for key in schema.keys.get(path, ()))
    may_stand_alone = may_stand_alone or _is_switch(path, schema)
    if is_negated or (may_stand_alone and _is_next_an_option(rest)):
        return None
    return _next(rest, flag, f"a value; {flag}=VALUE gives one that begins with -- or @")


def _is_switch(path: Path, schema: SchemaKeys) -> bool:
    """Whether the name of a section alone switches it on, with its defaults."""
    section = schema.sections.get(path)
    return section is not None and section.is_nullable and set(section.variants) == {""}


def _is_next_an_option(rest: Sequence[str]) -> bool:
    return not rest or rest[0].startswith(("--", "@"))


def _next(rest: list[str], after: str, what: str) -> str:
    if _is_next_an_option(rest):
        raise ConfigError(f"{after} needs {what}")
    return rest.pop(0)


def _path_of_flag(flag: str) -> tuple[Path, bool]:
    """The key that a flag names, and whether the flag says no to it."""
    name = flag.removeprefix("--").replace("-", "_")
    return tuple(name.removeprefix("no_").split(".")), name.startswith("no_")


def layer_of_flags(flags: Sequence[tuple[str, str | None]], schema: SchemaKeys) -> list[Setting]:
    """The settings of the command line. Raises ConfigError."""
    settings: list[Setting] = []
    unknown: list[str] = []
    for flag, value in flags:
        path, is_negated = _path_of_flag(flag)
        if path not in schema:
            unknown.append(_unknown(path, flag, schema))
            continue
        if is_negated and (value is not None or not any(key.is_flag for key in schema.keys.get(path, ()))):
            raise ConfigError(f"{flag}: only a boolean key can be negated, and without a value")
        alone = "{}" if _is_switch(path, schema) else str(not is_negated).lower()
        text = value if value is not None else alone
        settings.extend(_decoded(path, text, flag, schema))
    return _all_known(settings, unknown)


def layer_of_environment(environ: Mapping[str, str], schema: SchemaKeys) -> list[Setting]:
    """The settings of `ZERO_BAND_SECTION__KEY` variables, in any case. Raises ConfigError."""
    settings: list[Setting] = []
    unknown: list[str] = []
    for variable in sorted(environ):
        if not variable.upper().startswith(ENV_PREFIX):
            continue
        path = tuple(variable[len(ENV_PREFIX) :].lower().split(ENV_DELIMITER))
        if path in schema:
            settings.extend(_decoded(path, environ[variable], variable, schema))
        else:
            unknown.append(_unknown(path, variable, schema))
    return _all_known(settings, unknown)


def layer_of_file(file: FilePath, schema: SchemaKeys) -> list[Setting]:
    """The settings of a TOML file. Raises ConfigError."""
    try:
        table = parse_toml(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"@{file}: {error.strerror or error}{_files_beside(file)}") from error
    except ValueError as error:
        raise ConfigError(f"{file} is no valid TOML: {error}{_line_of(error, file, schema)}") from error
    return _flat(table, str(file), schema)


def parse_toml(content: bytes) -> dict[str, Any]:
    """What a file of TOML holds; a byte order mark, which some editors write, may begin it. Raises ValueError."""
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse_json(text: str) -> Any:
    """What JSON says. Raises ValueError, also where it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _files_beside(file: FilePath) -> str:
    """The TOML files where one is missing, those with a name like it first."""
    if file.is_dir():
        return "; name one of its files"
    if file.stem in preset_names():
        return f"; did you mean the preset @{file.stem}?"
    names = [path.name for path in sorted(file.parent.glob("*.toml"))] if file.parent.is_dir() else []
    where = file.parent.absolute()
    if not names:
        return f"; there is no TOML file in {where}"
    close = difflib.get_close_matches(file.name, names, n=1, cutoff=0.75)
    return f"; did you mean @{file.parent / close[0]}?" if close else f"; in {where} there are {', '.join(names[:8])}"


def _line_of(error: ValueError, file: FilePath, schema: SchemaKeys) -> str:
    """The line of a file that an error of its syntax names, and where in it; not one that may hold a secret."""
    place = re.search(r"at line (\d+), column (\d+)", str(error))
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    if place is None or int(place[1]) > len(lines):
        return ""
    line = lines[int(place[1]) - 1]
    if any(key[-1] in line and schema.holds_secret(key) for key in schema.keys):
        return ""
    return f"\n  {line}\n  {' ' * (int(place[2]) - 1)}^"


def _decoded(path: Path, text: str, origin: str, schema: SchemaKeys) -> list[Setting]:
    """What a text means for a key: a list as JSON or with commas, a section as JSON; all else is pydantic's matter."""
    if path in schema.sections and text.lower() != NONE:
        return _flat(_nested(path, _json_table(text, path, origin, schema)), origin, schema)
    if any(key.is_list for key in schema.keys.get(path, ())) and text.lower() != NONE:
        return [Setting(path, _list(text, path, origin), origin)]
    if any(key.is_table for key in schema.keys.get(path, ())) and text.lower() != NONE:
        return [Setting(path, _table(text, path, origin), origin)]
    return [Setting(path, _none_where_allowed(path, text, schema), origin)]


def _list(text: str, path: Path, origin: str) -> list[Any]:
    """A list written as JSON or as a,b,c; an empty text is an empty list."""
    if not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",")] if text.strip() else []
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{dotted(path)}={text!r} (from {origin}) is no JSON list: {error}") from error


def _table(text: str, path: Path, origin: str) -> dict[str, Any]:
    """A table whose keys are somebody else's, as JSON."""
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"{dotted(path)}={text!r} (from {origin}) is no JSON object {{...}}; in a file it is a table")
    return cast(dict[str, Any], value)


def _json_table(text: str, path: Path, origin: str, schema: SchemaKeys) -> dict[str, Any]:
    """A section written as JSON. Its text may hold a secret and is not shown."""
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        name, tags = dotted(path), [tag for tag in schema.sections[path].variants if tag]
        if text in tags:
            raise ConfigError(f"{name} (from {origin}) is a section: did you mean --{name}.{TAG} {text}?")
        raise ConfigError(
            f"{name} (from {origin}) is a section: set its keys, such as {name}.KEY, or give JSON {{...}}"
        )
    return cast(dict[str, Any], value)


def _nested(path: Path, value: Any) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return cast(dict[str, Any], value)


def _flat(table: Mapping[str, Any], origin: str, schema: SchemaKeys) -> list[Setting]:
    unknown: list[str] = []
    settings = list(_leaves(table, (), origin, schema, unknown))
    return _all_known(settings, unknown)


def _leaves(
    table: Mapping[str, Any], path: Path, origin: str, schema: SchemaKeys, unknown: list[str]
) -> Iterator[Setting]:
    """The settings of nested tables; adds a message to `unknown` for each key that the schema does not have."""
    for name, value in table.items():
        here = (*path, name)
        if here not in schema:
            unknown.append(_unknown(here, origin, schema))
        elif here in schema.sections and isinstance(value, dict):
            yield Setting(here, {}, origin)
            yield from _leaves(cast(dict[str, Any], value), here, origin, schema, unknown)
        else:
            yield Setting(here, _none_where_allowed(here, value, schema), origin)


def _none_where_allowed(path: Path, value: Any, schema: SchemaKeys) -> Any:
    is_none = isinstance(value, str) and value.lower() == NONE and schema.is_nullable(path)
    return None if is_none else value


_RENAMED = {"outer.clip_to_median": 'outer.robust.type = "clip"'}
"""What stands for keys that are no more."""


def _unknown(path: Path, origin: str, schema: SchemaKeys) -> str:
    name = dotted(path)
    if name in _RENAMED:
        return f"unknown key {name} (from {origin}): it is {_RENAMED[name]} now"
    nearest = schema.nearest(name)
    siblings = dict.fromkeys(key[-1] for key in (*schema.keys, *schema.sections) if key[:-1] == path[:-1])
    if nearest:
        hint = f"did you mean {' or '.join(filter(None, [', '.join(nearest[:-1]), nearest[-1]]))}?"
    elif siblings:
        hint = f"there are {', '.join(siblings)}"
    else:
        hint = "--help lists all keys"
    return f"unknown key {name} (from {origin}): {hint}"


def _all_known(settings: list[Setting], unknown: Sequence[str]) -> list[Setting]:
    if unknown:
        raise ConfigError("\n".join(unknown))
    return settings


def merge(layers: Iterable[Iterable[Setting]], schema: SchemaKeys) -> dict[Path, Setting]:
    """The settings that hold, by key, after all layers from the weakest to the strongest."""
    merged: dict[Path, Setting] = {}
    for layer in layers:
        for setting in sorted(layer, key=lambda setting: setting.path[-1] != TAG):  # a new type before its keys
            _set(merged, setting, schema)
    return merged


def _set(merged: dict[Path, Setting], setting: Setting, schema: SchemaKeys) -> None:
    path = setting.path
    section = schema.sections.get(path[:-1])
    if path[-1] == TAG and section is not None:
        before = merged.get(path)
        if setting.value != (before.value if before else section.default_tag):
            _drop_below(merged, path[:-1])
    for length in range(1, len(path)):
        above = merged.get(path[:length])
        if above is not None and above.value != {}:
            del merged[path[:length]]  # the section was off, and is on again
    if setting.value != {}:
        _drop_below(merged, path)
    elif path in merged and merged[path].value == {}:
        return
    merged[path] = setting


def _drop_below(merged: dict[Path, Setting], path: Path) -> None:
    for below in [key for key in merged if key[: len(path)] == path and key != path]:
        del merged[below]


def nested(merged: Mapping[Path, Setting], schema: SchemaKeys) -> dict[str, Any]:
    """The settings as nested tables for validation. A section gets the tag of its default where it has none."""
    root: dict[str, Any] = {}
    for path, setting in sorted(merged.items()):
        table = root
        for length, name in enumerate(path[:-1], start=1):
            if name not in table:
                table[name] = _new_table(path[:length], schema)
            table = table[name]
        is_section = path in schema.sections and setting.value == {}
        table[path[-1]] = _new_table(path, schema) if is_section else setting.value
    return root


def _new_table(path: Path, schema: SchemaKeys) -> dict[str, Any]:
    tag = schema.sections[path].default_tag
    return {TAG: tag} if tag else {}
