"""Where a tool that shows a run reads what its nodes recorded: a folder, or the run's store."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path

from zeroband.errors import ConfigError
from zeroband.observe.facts import FactSource, FolderFacts
from zeroband.observe.status import find_run_dir

TOKEN_VARIABLE = "ZERO_BAND_RUN__TOKEN"


def add_source(parser: argparse.ArgumentParser) -> None:
    """Let the arguments say which run is meant."""
    parser.add_argument("run_dir", type=Path, nargs="?", help="<run.dir>/<run.id>, for example runs/default")
    parser.add_argument("--store", metavar="URL", help="read from the run's store (store.url) instead of a folder")
    parser.add_argument("--run-id", metavar="ID", help="with --store: the run.id of its nodes")
    parser.add_argument(
        "--token-file", type=Path, metavar="PATH", help=f"with --store: holds run.token; without it {TOKEN_VARIABLE}"
    )


def open_source(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> FactSource:
    """Open what the arguments name; `close()` it. Raises ConfigError."""
    run_dir: Path | None = options.run_dir
    url: str | None = options.store
    run_id: str | None = options.run_id
    token_file: Path | None = options.token_file
    if (run_dir is None) == (url is None):
        raise ConfigError("name one run: its folder (runs/default), or --store URL --run-id ID")
    if run_dir is not None:
        if run_id is not None or token_file is not None:
            raise ConfigError("--run-id and --token-file go with --store; a folder is a run, and has no token")
        return FolderFacts(find_run_dir(run_dir))
    if url is None or run_id is None:
        raise ConfigError("--store needs --run-id: a store may hold several runs")
    from zeroband.elastic.store.facts import StoreFacts

    return StoreFacts(url, run_id, token_of(options, environ))


def token_of(options: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str | None:
    """The run's token that the arguments or the environment name. Raises ConfigError."""
    from zeroband.config.token_file import read_token

    token_file: Path | None = options.token_file
    return environ.get(TOKEN_VARIABLE) if token_file is None else read_token(token_file).get_secret_value()
