"""What the tests of the configuration share: a way to load one that sees nothing of this process's environment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from zeroband.config import RunConfig, load_config
from zeroband.errors import ConfigError

STORE = {"ZERO_BAND_STORE__URL": "redis://localhost:6379"}
Load = Callable[..., RunConfig]
Refusal = Callable[..., str]
Write = Callable[[str, str], str]


@pytest.fixture
def load() -> Load:
    """`load(*argv, **environ)` with that environment only."""
    return lambda *argv, **environ: load_config(argv, environ)


@pytest.fixture
def refusal() -> Refusal:
    """`refusal(*argv, **environ)`: the message with which this is refused."""

    def refused(*argv: str, **environ: str) -> str:
        with pytest.raises(ConfigError) as caught:
            load_config(argv, environ)
        return str(caught.value)

    return refused


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(name, toml)` makes a file and gives it as the command line wants it: `@path`."""

    def written(name: str, text: str) -> str:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return f"@{tmp_path / name}"

    return written
