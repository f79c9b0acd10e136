"""What all sections of the configuration share."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr

NODE_LOCAL: dict[str, Any] = {"scope": "node"}
"""Marks a field that may differ between the nodes of one run; every other field is compared at join."""

NONE = "none"
"""How files, environment and flags write "off" or "not set", which TOML has no value for."""

MASK = "**********"
"""Stands for a secret wherever values are shown."""

TAG = "type"
"""The key that chooses the variant of a section."""

NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"
"""Form of the names of a run and of a node: they become parts of keys, folders and file names."""

Secret = Annotated[SecretStr, Field(min_length=1)]
"""Never shown; an empty one is most likely a variable that was not set."""


def _require_below(name: str) -> str:
    if not name.isprintable() or name.startswith("/") or "://" in name or {"", ".."} & set(name.split("/")):
        raise ValueError(f"{name!r} leads outside of the folder of the file that names it")
    return name


FileBelow = Annotated[str, AfterValidator(_require_below)]
"""Name of a file in or below the folder of the index that lists it: an index cannot read other files."""


class Section(BaseModel):
    """A strict, frozen part of the configuration."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)


class OwnSection(Section):
    """A section of which each node sets every key for itself."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for field in cls.model_fields.values():
            field.json_schema_extra = NODE_LOCAL


def key_value(text: str) -> tuple[str, Any]:
    """The two sides; a value that is no JSON is text. Raises ValueError where one of them is missing."""
    key, equals, value = text.partition("=")
    if not (key and equals and value):
        raise ValueError(f"{text!r} is no KEY=VALUE")
    try:
        return key, json.loads(value)
    except (ValueError, RecursionError):
        return key, value
