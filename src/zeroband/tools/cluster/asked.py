"""What a command is asked to start on this machine: `run.dir` and `run.id` as its nodes will have them, its secrets."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import SecretStr

from zeroband.config.keys import dotted, schema_keys
from zeroband.config.load import given_settings
from zeroband.config.sources import ENV_DELIMITER, ENV_PREFIX
from zeroband.errors import ConfigError
from zeroband.node.run_names import AUTO, new_run_name


def asked_run(arguments: Sequence[str], prefix: str | None = None) -> tuple[Path, str]:
    """`run.dir` and `run.id` of nodes with these arguments: by flags, else by the environment, else a new name.

    Files do not count: every start of one is another run. `prefix`: before the time in a new name; None: it is one of
    words. Raises: ConfigError.
    """
    asked = given_settings(arguments, os.environ, with_files=False)
    directory, run_id = Path(asked.get(("run", "dir")) or "runs"), asked.get(("run", "id"))
    if run_id == AUTO:
        raise ConfigError("run.id='auto': this command names its run by itself; drop it")
    if run_id is None:
        by_time = time.strftime(f"{prefix}-%Y%m%d-%H%M%S", time.gmtime())
        run_id = new_run_name(directory) if prefix is None else by_time
    return directory, run_id


def asked_store(arguments: Sequence[str]) -> str | None:
    """`store.url` of nodes with these arguments, by flags or by the environment; None: a server is started for them."""
    return given_settings(arguments, os.environ, with_files=False).get(("store", "url"))


def without_secrets(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments of a node but for its secrets, and these as variables of its environment.

    Every user of the machine sees command lines.
    """
    schema = schema_keys()
    names = {dotted(path): path for path in schema.keys if SecretStr in schema.kinds(path)}
    kept: list[str] = []
    secrets: dict[str, str] = {}
    left = [*arguments]
    while left:
        flag, equals, value = left.pop(0).partition("=")
        path = names.get(flag.removeprefix("--").replace("-", "_")) if flag.startswith("--") else None
        if path is None or not (equals or left):
            kept.append(flag + equals + value)
        else:
            secrets[ENV_PREFIX + ENV_DELIMITER.join(path).upper()] = value if equals else left.pop(0)
    return tuple(kept), secrets
