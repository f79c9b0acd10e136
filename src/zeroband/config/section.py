"""The base of all configuration sections."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

NODE_LOCAL: dict[str, Any] = {"scope": "node"}
"""Marks a field that may differ between nodes; all others are compared when a node joins."""

NONE = "none"
"""How files, environment and flags write None, which TOML lacks."""

MASK = "**********"
"""Replaces a secret in output."""

TAG = "type"
"""The key that selects a section's variant."""

NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"
"""Form of run and node names, which become parts of keys, folders and file names."""

Secret = Annotated[SecretStr, Field(min_length=1)]
"""A value that is never shown. Empty is refused: most likely a variable was not set."""


def _require_below(name: str) -> str:
    if not name.isprintable() or name.startswith("/") or "://" in name or {"", ".."} & set(name.split("/")):
        raise ValueError(f"{name!r} leads outside of the folder of the file that names it")
    return name


FileBelow = Annotated[str, AfterValidator(_require_below)]
"""Name of a file in or below the folder of the index that lists it: an index cannot name other files."""


class Section(BaseModel):
    """A strict, frozen part of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


@cache
def meanings(section: type[Section]) -> Mapping[str, str]:
    """Return the text below each key of a section, for `--help`.

    pydantic's `use_attribute_docstrings` would read the source at each start: 0.1 s of each process.
    """
    found: dict[str, str] = {}
    for owner in reversed(section.__mro__):
        if issubclass(owner, Section):
            (definition,) = ast.parse(inspect.getsource(owner)).body
            assert isinstance(definition, ast.ClassDef)
            for field, text in pairwise(definition.body):
                match field, text:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                        found[name] = inspect.cleandoc(meaning)
                    case _:
                        pass
    return found


class OwnSection(Section):
    """A section with only node-local keys."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.json_schema_extra = NODE_LOCAL


def key_value(text: str) -> tuple[str, Any]:
    """Split KEY=VALUE; a value that is not JSON is text. Raises ValueError."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ValueError(f"{text!r} is no KEY=VALUE")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
