"""`zeroband join URL --run-id ID --token-file F`: join a run of other machines with this one.

Reads the shared settings and the state of the run from its store, writes this machine's configuration, checks whether
this machine can take part, and replaces itself with `zeroband launch`. Settings that nodes do not share, such as paths
of texts, follow as for `train`: @file.toml, --section.key value. Exit codes: those of launch; 1 the store is
unreachable, 2 no such run or wrong arguments, 3 this machine cannot take part.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from zeroband.config import RunConfig
from zeroband.config.render import render_toml
from zeroband.config.schema import FaultConfig
from zeroband.config.shared import other_items, recorded_config, shown
from zeroband.config.store_url import shown_stores
from zeroband.elastic.membership.records import BOOTSTRAP_ROUND
from zeroband.elastic.store.interface import PROTOCOL, REMARK
from zeroband.errors import ConfigError, JoinRefused
from zeroband.node.gpus import visible_gpus
from zeroband.node.names import node_id_of
from zeroband.tools.arguments import ID_VARIABLE, parser_of, run_command, token_of
from zeroband.tools.arguments import STORE_VARIABLE as _URL
from zeroband.tools.arguments import TOKEN_VARIABLE as _TOKEN
from zeroband.tools.ctl import describe, next_round, open_run

_EXIT_UNFIT = 3
_TOKEN_FILE = f"{_TOKEN}_FILE"


def main(argv: Sequence[str]) -> int:
    """Join a run: this process becomes the launcher, or the exit code is returned."""
    has_url = bool(argv) and "://" in argv[0]
    options, own = _parser().parse_known_args(argv[has_url:])
    url = argv[0] if has_url else os.environ.get(_URL, "")
    return run_command("join", lambda: _join(url, options, own))


def _join(url: str, options: argparse.Namespace, own: Sequence[str]) -> int:
    environment = {_URL: url, **_secrets(options.token_file)}
    config = _config_of_run(url, options, own, environment)
    file = config.run.dir / config.run.id / f"join-{node_id_of(config)}.toml"
    ranks = options.nproc_per_node or ("gpu" if visible_gpus(os.environ) else "1")
    launch = ["launch", "--nproc-per-node", ranks, f"@{file}"]
    shown_environment = {**environment, _URL: shown_stores(url)}  # without password and token
    shown_environment.pop(_TOKEN, None)
    words = [*(f"{name}={shlex.quote(value)}" for name, value in shown_environment.items()), "zeroband", *launch]
    if options.dry_run:
        print(f"\n{render_toml(config)}\nwould be written to {file} and started with\n  {' '.join(words)}")
        return 0
    _write(config, file)
    print(f"\nthis machine's configuration is in {file}; started with\n  {' '.join(words)}", flush=True)
    environment = {**os.environ, **environment}
    print("\nchecking whether this machine can take part:", flush=True)
    doctor = [sys.executable, "-m", "zeroband.cli", "doctor", f"@{file}"]
    code = subprocess.run(doctor, env=environment, check=False).returncode
    if code:
        print("zeroband join: this machine cannot take part; see above", file=sys.stderr)
        return _EXIT_UNFIT
    os.execve(sys.executable, [sys.executable, "-m", "zeroband.node.launch", *launch[1:]], environment)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(
        "join",
        "Join a run with this machine, using the shared settings in the run's store.\n"
        f"URL: the run's store; with a password, better {_URL} in the environment.",
        usage="zeroband join URL --run-id ID [--token-file F] [--dry-run] [@file.toml ...] [--section.key value ...]",
        epilog="example: zeroband join redis://HOST:6379 --run-id first --token-file token",
    )
    add, env = parser.add_argument, os.environ
    add(
        "--run-id",
        "--run.id",
        default=env.get(ID_VARIABLE, "default"),
        metavar="ID",
        help="run.id of its nodes",
    )
    add("--token-file", type=Path, metavar="FILE", help=f"file with run.token (or {_TOKEN_FILE}, {_TOKEN})")
    add("--nproc-per-node", metavar="N", help="ranks of this machine (default: one for each GPU, or one)")
    add("--dry-run", action="store_true", help="print the configuration and the command; write and start nothing")
    return parser


def _config_of_run(
    url: str, options: argparse.Namespace, own: Sequence[str], environment: Mapping[str, str]
) -> RunConfig:
    """Read the run's settings from the store and print its state. Raises ConfigError and StoreLost.

    `environment`: secrets for the trainer: the store's address, which may contain a password, and a token.
    """
    run_id: str = options.run_id
    if not url:
        raise ConfigError(f"no URL of the run's store: give zeroband join redis://HOST:6379 ..., or set {_URL}")
    try:
        place = shown_stores(url)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    record, standing = _look(url, run_id, token_of(options))
    if record.get("protocol") != str(PROTOCOL):
        raise JoinRefused("protocol", shown(record.get("protocol", "absent")), PROTOCOL)
    if record.get("run.id") != run_id:
        other = shown(record.get("run.id", ""))
        raise ConfigError(f"the store's record of run.id={run_id!r} belongs to run.id={other!r}")
    config = recorded_config(record, own, {**os.environ, **environment})
    access = "the token is correct" if len(environment) > 1 else "the run has no token"
    print(f"connected to {place}; {access}\n\n{standing}\n\nits nodes share {len(record)} settings:")
    for key, value in other_items(record).items():
        print(f"  {shown(key)}: {shown(value) or 'none'}{'' if key.startswith(REMARK) else ', compared at join'}")
    return config


def _write(config: RunConfig, file: Path) -> None:
    """Write this machine's configuration, without its secrets. Raises ConfigError."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(render_toml(config))
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; set --run.dir to a folder of this user's") from error


def _secrets(token_file: Path | None) -> dict[str, str]:
    """Return the token's environment variable, preferably as a file."""
    if token_file is not None:
        return {_TOKEN_FILE: str(token_file.absolute())}
    return {name: os.environ[name] for name in (_TOKEN, _TOKEN_FILE) if name in os.environ}


def _look(url: str, run_id: str, token: str | None) -> tuple[dict[str, str], str]:
    """Return the run's shared settings and a description of its state. Raises ConfigError and StoreLost."""
    with closing(open_run(url, run_id, token, lease_s=FaultConfig().time_outs.lease_s)) as store:
        record = store.record()
        if record is None:
            raise ConfigError(f"this store has no run.id={run_id!r}; name the run and the store of its nodes")
        return record, describe(run_id, store.view(next_round(store.view(BOOTSTRAP_ROUND))))
