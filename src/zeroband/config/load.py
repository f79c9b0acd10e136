"""From the command line to one frozen configuration: TOML files, then environment, then flags; the last one wins."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from zeroband.config.keys import SchemaKeys, schema_keys
from zeroband.config.layers import (
    Setting,
    layer_of_environment,
    layer_of_file,
    layer_of_flags,
    parse_command_line,
)
from zeroband.config.merge import merge, nested
from zeroband.config.problems import describe
from zeroband.config.render import help_text, render_toml
from zeroband.config.schema import RunConfig
from zeroband.config.shared import shared_digest, shared_items
from zeroband.errors import ConfigError

__all__ = ["load_config", "render_toml", "shared_digest", "shared_items"]

_ROOT = "config"


def load_config(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> RunConfig:
    """The configuration that the arguments, and the environment below them, ask for.

    `--help` and `--dry-run` print and end the process (SystemExit 0); of several local ranks, the first one prints.
    Raises: ConfigError with a line for each thing that is wrong.
    """
    environ = os.environ if environ is None else environ
    schema = schema_keys()
    line = parse_command_line(argv, schema)
    if line.wants_help:
        _print_and_exit(help_text(schema), environ)
    layers = [
        *(layer_of_file(file, schema) for file in line.files),
        layer_of_environment(environ, schema),
        layer_of_flags(line.flags, schema),
    ]
    config = _validated(layers, schema)
    if line.is_dry_run:
        _print_and_exit(render_toml(config), environ)
    return config


def _print_and_exit(text: str, environ: Mapping[str, str]) -> None:
    if environ.get("LOCAL_RANK", "0") == "0":
        print(text, end="")
    raise SystemExit(0)


class _MergedLayers(PydanticBaseSettingsSource):
    """The one source of the settings: pydantic-settings' own merge would mix the keys of two variants of a section."""

    def __init__(self, settings_cls: type[BaseSettings], values: dict[str, Any]) -> None:
        super().__init__(settings_cls)
        self._values = values

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self._values, field_name, False

    def __call__(self) -> dict[str, Any]:
        return {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}


def _validated(layers: Iterable[Iterable[Setting]], schema: SchemaKeys) -> RunConfig:
    merged = merge(layers, schema)

    class RunSettings(BaseSettings):
        config: RunConfig

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (_MergedLayers(settings_cls, nested(merged, schema)),)

    try:
        return RunSettings().config  # pyright: ignore[reportCallIssue]
    except ValidationError as error:
        raise ConfigError(describe(error, merged, schema, depth=1)) from None
