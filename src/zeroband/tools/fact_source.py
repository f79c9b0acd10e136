"""Where a tool that shows a run reads what its nodes recorded: a folder, or the run's store."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from zeroband.errors import ConfigError
from zeroband.observe.facts import FactSource, FolderFacts
from zeroband.observe.status import find_run_dir

STORE_VARIABLE, TOKEN_VARIABLE = "ZERO_BAND_STORE__URL", "ZERO_BAND_RUN__TOKEN"


def add_source(parser: argparse.ArgumentParser) -> None:
    """Let the arguments say which run is meant."""
    parser.add_argument("run_dir", type=Path, nargs="?", help="<run.dir>/<run.id>, for example runs/first")
    parser.add_argument(
        "--store", metavar="URL", help=f"the run's store (store.url) instead of a folder; without it {STORE_VARIABLE}"
    )
    parser.add_argument("--run-id", metavar="ID", help="in a store: the run.id of its nodes")
    parser.add_argument(
        "--token-file", type=Path, metavar="PATH",
        help=f"in a store: holds run.token; without it {TOKEN_VARIABLE} or {TOKEN_VARIABLE}_FILE",
    )  # fmt: skip


def open_source(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> FactSource:
    """Open what the arguments name; `close()` it. Raises ConfigError."""
    run_dir: Path | None = options.run_dir
    run_id: str | None = options.run_id
    is_in_store = any(asked is not None for asked in (options.store, run_id, options.token_file))
    if (run_dir is None) != is_in_store:
        raise ConfigError("name one run: its folder (runs/first), or --store URL --run-id ID")
    if run_dir is not None:
        return FolderFacts(find_run_dir(run_dir))
    if run_id is None:
        raise ConfigError("a store may hold several runs: --store needs --run-id")
    from zeroband.elastic.store.facts import StoreFacts

    return StoreFacts(store_of(options, environ), run_id, token_of(options, environ))


def store_of(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str:
    """The address of the store that the arguments or the environment name. Raises ConfigError."""
    url: str | None = options.store or environ.get(STORE_VARIABLE)
    if url is None:
        raise ConfigError(f"--run-id needs the run's store: give --store URL, or set {STORE_VARIABLE}")
    return url


def token_of(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str | None:
    """The run's token that the arguments or the environment name. Raises ConfigError."""
    from zeroband.config.token_file import read_token

    named = environ.get(f"{TOKEN_VARIABLE}_FILE")
    token_file: Path | None = options.token_file or (None if TOKEN_VARIABLE in environ or not named else Path(named))
    return environ.get(TOKEN_VARIABLE) if token_file is None else read_token(token_file).get_secret_value()
