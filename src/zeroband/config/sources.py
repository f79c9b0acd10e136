"""Sources of settings by pydantic-settings: TOML files and presets, environment, flags. The last one wins."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path as FilePath
from types import NoneType
from typing import Any, Protocol, cast

import tomli
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, TomlConfigSettingsSource

from zeroband.config.keys import TAG, Path, dotted, kinds_of, schema_keys
from zeroband.config.schema import RunConfig
from zeroband.config.section import NONE
from zeroband.errors import ConfigError

ENV_PREFIX = "ZERO_BAND_"
ENV_DELIMITER = "__"

_PRESETS = FilePath(__file__).parents[1] / "presets"  # a symbolic link to configs/ in a clone

_SCHEMA = cast("Any", RunConfig)
"""Sources read the fields of any model, but are typed for BaseSettings."""

_RENAMED = {
    "outer.clip_to_median": 'outer.robust.type = "clip"',
    "node.dialable": "node.dial_out_only, true where it was false,",
    "found": "bootstrap",
    "fault.transfer_s": "fault.gloo_timeout_s",
}
"""Replacements of removed keys."""


class SettingsSource(Protocol):
    """The settings of one source, as nested tables."""

    def __call__(self) -> dict[str, Any]: ...

    def origin(self, path: Path) -> str | None:
        """Return where the user wrote this key, or a section that holds it; None: not here."""
        ...


class TomlFile(TomlConfigSettingsSource):
    """The settings of a TOML file. Raises ConfigError if it cannot be read, with the line of a syntax error."""

    def __init__(self, file: FilePath) -> None:
        self._file = file
        super().__init__(_SCHEMA, file)

    def __call__(self) -> dict[str, Any]:
        return self.toml_data

    def origin(self, path: Path) -> str | None:
        return str(self._file)

    def _read_files(self, files: Any, deep_merge: bool = False) -> dict[str, Any]:
        file = self._file
        try:
            return tomli.loads(file.read_bytes().decode("utf-8-sig"))
        except OSError as error:
            raise ConfigError(f"@{file}: {error.strerror or error}{_nearby_files(file)}") from error
        except ValueError as error:
            raise ConfigError(f"{file} is no valid TOML: {error}{self._line_of(error)}") from error
        except RecursionError as error:
            raise ConfigError(f"{file} is no valid TOML: it is nested too deeply") from error

    def _line_of(self, error: ValueError) -> str:
        """Return the line of a syntax error with a marker, unless it may hold a secret."""
        place = re.search(r"at line (\d+), column (\d+)", str(error))
        lines = self._file.read_text(encoding="utf-8", errors="replace").splitlines()
        if place is None or int(place[1]) > len(lines):
            return ""
        line = lines[int(place[1]) - 1]
        if any(key[-1] in line and schema_keys().holds_secret(key) for key in schema_keys().keys):
            return ""
        return f"\n  {line}\n  {' ' * (int(place[2]) - 1)}^"


def preset_names() -> list[str]:
    """Return the names of the presets, those in folders last: `150M`, ..., `debug/diloco`."""
    found = [path.relative_to(_PRESETS).with_suffix("").as_posix() for path in _PRESETS.rglob("*.toml")]
    return sorted(found, key=lambda name: (name.count("/"), name))


def config_file(name: str) -> FilePath:
    """Resolve `@name`: a file, or else a preset. Raises ConfigError, with the nearest name, if it is neither."""
    path, names = FilePath(name), preset_names()
    if path.suffix or path.is_file():
        return path
    if name in names:
        return _PRESETS / f"{name}.toml"
    if path.exists():
        return path
    lowered = {preset.lower(): preset for preset in names}
    close = difflib.get_close_matches(name.lower().removeprefix("configs/"), lowered, n=1)
    hint = f"did you mean @{lowered[close[0]]}? " if close else ""
    raise ConfigError(f"@{name}: neither a file nor a preset; {hint}presets are {', '.join(names)}")


class Text(EnvSettingsSource):
    """A setting as text: an environment variable or a flag.

    Lists are JSON or a,b,c; sections and tables are JSON. Other text stays text, and fails validation later.
    """

    def __init__(self, path: Path, text: str, written: str) -> None:
        self.path, self.text, self.written = path, text, written
        super().__init__(_SCHEMA, case_sensitive=True, env_prefix="", env_nested_delimiter=".")

    def __call__(self) -> dict[str, Any]:
        name = self.path[0]  # all other fields have nothing here
        field = RunConfig.model_fields[name]
        value, _, is_complex = self.get_field_value(field, name)
        return {name: self.prepare_field_value(name, field, value, is_complex)}

    def origin(self, path: Path) -> str | None:
        return self.written if path[: len(self.path)] == self.path else None

    def _load_env_vars(self) -> Mapping[str, str | None]:
        is_empty_list = not self.text.strip() and tuple in schema_keys().kinds(self.path)
        return {dotted(self.path): "[]" if is_empty_list else self.text}

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        """Parse the text of a list, a table or a section."""
        text = str(value)
        if tuple in kinds_of(field) and text.lower() != NONE and not text.lstrip().startswith("["):
            return [part.strip() for part in text.split(",")]
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return found if isinstance(found, dict | list) else text


def variables(environ: Mapping[str, str]) -> list[Text]:
    """Return the settings of `ZERO_BAND_SECTION__KEY` variables, in any case."""
    names = [name for name in sorted(environ) if name.upper().startswith(ENV_PREFIX)]
    return [Text(tuple(name[len(ENV_PREFIX) :].lower().split(ENV_DELIMITER)), environ[name], name) for name in names]


def _nearby_files(file: FilePath) -> str:
    """Name the nearby TOML files when one is missing, the most similar first."""
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


class Settings:
    """The merged settings of all sources, as nested tables for validation, and their origins.

    A later source overrides an earlier one key by key. A section that changes its type drops the keys of the former
    type; one that is switched off drops all keys, until a later key switches it on again.
    """

    def __init__(self, sources: Iterable[SettingsSource]) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[Path, str] = {}
        unknown: list[str] = []
        for source in sources:
            if (
                isinstance(source, Text) and source.path not in schema_keys()
            ):  # EnvSettingsSource only looks up known keys
                unknown.append(unknown_key(source.path, source.written))
            else:
                unknown += self._merge(self.values, source(), (), source)
        if unknown:
            raise ConfigError("\n".join(unknown))

    def get(self, path: Path) -> Any:
        """Return the value of a key; None if no source sets it."""
        value: Any = self.values
        for name in path:
            value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
        return value

    def _merge(self, into: dict[str, Any], table: dict[str, Any], path: Path, source: SettingsSource) -> Iterator[str]:
        """Merge a table into another. Yields a message for each unknown key."""
        schema = schema_keys()
        if TAG in table and (*path, TAG) in schema and table[TAG] != into.get(TAG):
            into.clear()
        for name, value in table.items():
            here = (*path, name)
            origin = source.origin(here)
            if here not in schema:
                yield unknown_key(here, origin or "")
                continue
            if origin:
                self.origins[here] = origin
            section = schema.sections.get(here)
            if section is None or not isinstance(value, dict):
                is_none = isinstance(value, str) and value.lower() == NONE and NoneType in schema.kinds(here)
                into[name] = None if is_none else value
                continue
            if not isinstance(into.get(name), dict):
                into[name] = {TAG: section.default_tag} if section.default_tag else {}
            yield from self._merge(into[name], cast("dict[str, Any]", value), here, source)


def unknown_key(path: Path, origin: str) -> str:
    """Return the error for an unknown key."""
    name = dotted(path)
    if name in _RENAMED:
        return f"unknown key {name} (from {origin}): it is {_RENAMED[name]} now"
    schema = schema_keys()
    nearest = schema.nearest(name)
    siblings = dict.fromkeys(key[-1] for key in (*schema.keys, *schema.sections) if key[:-1] == path[:-1])
    if nearest:
        hint = f"did you mean {' or '.join(filter(None, [', '.join(nearest[:-1]), nearest[-1]]))}?"
    elif siblings:
        hint = f"there are {', '.join(siblings)}"
    else:
        hint = "--help lists all keys"
    return f"unknown key {name} (from {origin}): {hint}"
