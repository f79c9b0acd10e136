"""Options of `zeroband chaos`, and the checks before anything starts."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zeroband.config import RunConfig
from zeroband.config.store_url import NODES
from zeroband.errors import ConfigError
from zeroband.tools.arguments import parser_of
from zeroband.tools.chaos.plan import OF_ONE_STORE, OF_SEVERAL_STORES, PLANNED, Kind, kinds_of
from zeroband.tools.cluster.local import LocalCluster, asked_run

_CONFIG = Path(__file__).parents[4] / "configs" / "chaos.toml"
_FASTEST_STEPS_PER_S = 1000
"""Upper bound of a node's steps per second: a run of fewer steps may be complete before the end of the soak."""
_ADVISED_STEPS = 100_000_000
_AROUND_S = 600.0
"""Allowance for start-up and recovery."""


@dataclass(frozen=True)
class ChaosOptions:
    """Options of a soak."""

    arguments: tuple[str, ...]
    """Arguments of every node: `@config.toml --section.key value`."""
    nodes: int = 8
    mtbf_s: float = 20.0
    """Mean time between two faults of the run."""
    minutes: float = 10.0
    baseline_minutes: float | None = None
    """Undisturbed time before that. None: a fifth of `minutes`."""
    seed: int = 1
    stores: int = 1
    """Number of stores, one of which is in use; 0: each node holds one."""
    dial_out_only: int = 0
    """Number of dial-out-only nodes, the last ones."""
    kinds: tuple[Kind, ...] = ()
    """Kinds of faults to draw from; none: all possible ones."""
    keep_undisturbed: int = 2
    slack_s: float = 10.0
    """Allowed delay by a fault beyond fault.detect_s: a few seconds, more if nodes share cores."""
    is_host_shared: bool = False
    """Whether other work keeps the CPUs busy, so that nodes at background priority would take minutes to start."""
    directory: Path = Path("runs")
    """run.dir of every node."""
    run_id: str | None = None
    """None: generated."""

    @property
    def calm_minutes(self) -> float:
        return self.minutes / 5 if self.baseline_minutes is None else self.baseline_minutes

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(self.nodes))

    @property
    def dial_out_only_nodes(self) -> tuple[str, ...]:
        return self.names[self.nodes - self.dial_out_only :]

    @property
    def wanted_kinds(self) -> tuple[Kind, ...]:
        return self.kinds or kinds_of(stores=self.stores, dial_out_only=self.dial_out_only)

    @property
    def min_undisturbed(self) -> int:
        """Nodes to leave undisturbed: with several stores a majority, which is needed to move to another store."""
        return max(self.keep_undisturbed, self.nodes // 2 + 1 if self.stores != 1 else 0)

    @property
    def command(self) -> str:
        """Command that repeats the same faults."""
        given = [text for flag, name, _ in _NUMBERS for text in (flag, f"{getattr(self, name):g}")]
        given += ["--baseline-minutes", f"{self.calm_minutes:g}", "--stores", str(self.stores or NODES)]
        given += ["--shared-host"] if self.is_host_shared else []
        kinds = ["--kinds", ",".join(kind.value for kind in self.kinds)] if self.kinds else []
        return shlex.join(["zeroband", "chaos", *self.arguments, *given, *kinds])


_NUMBERS = (
    ("--nodes", "nodes", "number of nodes"),
    ("--mtbf-s", "mtbf_s", "mean seconds between faults"),
    ("--minutes", "minutes", "duration of the phase with faults"),
    ("--seed", "seed", "seed of the faults"),
    ("--dial-out-only", "dial_out_only", "number of nodes that cannot be dialled"),
    ("--keep-undisturbed", "keep_undisturbed", "nodes without faults at any time; with several stores a majority"),
    ("--slack-s", "slack_s", "seconds beyond fault.detect_s before a node counts as hanging"),
)
"""Flag, field and help of the numeric options."""


def read_options(argv: Sequence[str]) -> tuple[ChaosOptions, Path | None]:
    """Return the options and the file for the report. Raises ConfigError."""
    known, arguments = _parser().parse_known_args(argv)
    if not any(argument.startswith("@") for argument in arguments):
        arguments.insert(0, f"@{_CONFIG}")
    directory, run_id = asked_run(arguments, f"chaos-{os.getpid()}")
    given: dict[str, Any] = vars(known) | {"kinds": _kinds(known.kinds)}
    report = given.pop("report")
    return ChaosOptions(tuple(arguments), directory=directory, run_id=run_id, **given), report


def _kinds(text: str | None) -> tuple[Kind, ...]:
    """Parse --kinds. Raises ConfigError."""
    known = {kind.value: kind for kind in PLANNED}
    names = [name.strip() for name in text.split(",")] if text is not None else []
    for name in names:
        if name not in known:
            raise ConfigError(f"--kinds: no kind of fault is called {name!r}; there are: {', '.join(known)}")
    return tuple(dict.fromkeys(known[name] for name in names))


def _parser() -> argparse.ArgumentParser:
    default = ChaosOptions(())
    parser = parser_of(
        "chaos",
        "Train with several nodes on this machine while injecting random faults into them and their store. "
        f"Settings: configs/{_CONFIG.name} or the given file, overridden by --section.key.",
        usage="zeroband chaos [@file.toml ...] [options] [--section.key value ...]",
    )
    for flag, name, what in _NUMBERS:
        value = getattr(default, name)
        parser.add_argument(flag, type=type(value), default=value, help=f"{what}, default: %(default)s")
    parser.add_argument(
        "--baseline-minutes", type=float, help="undisturbed phase before, default: a fifth of --minutes"
    )
    parser.add_argument(
        "--stores",
        type=_stores,
        default=default.stores,
        help="number of stores, one of which is in use, default: %(default)s; nodes: each node holds one",
    )
    parser.add_argument("--kinds", help="comma-separated kinds of faults, default: all possible ones")
    parser.add_argument(
        "--shared-host",
        dest="is_host_shared",
        action="store_true",
        help="start nodes at normal priority, as other work keeps this host busy",
    )
    parser.add_argument("--report", type=Path, help="also write the report to this file")
    return parser


def require_soak(options: ChaosOptions) -> None:
    """Raise ConfigError for options with which a soak shows nothing."""
    times = {
        "--mtbf-s": options.mtbf_s,
        "--minutes": options.minutes,
        "--baseline-minutes": options.calm_minutes,
        "--slack-s": options.slack_s,
    }
    for name, value in times.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value:g} must be above 0")
    if not 1 <= options.keep_undisturbed <= options.nodes or options.nodes < 2:
        raise ConfigError(
            f"--nodes={options.nodes} must be 2 or more, and at least --keep-undisturbed={options.keep_undisturbed}, "
            "which must be 1 or more: an undisturbed node has to detect the faults"
        )
    if not 0 <= options.dial_out_only < options.nodes:
        raise ConfigError(
            f"--dial-out-only={options.dial_out_only} must be 0 or more, and fewer than --nodes={options.nodes}: "
            "at least one node must accept connections"
        )
    possible = kinds_of(stores=options.stores, dial_out_only=options.dial_out_only)
    if impossible := [kind.value for kind in options.kinds if kind not in possible]:
        raise ConfigError(
            f"--kinds: {', '.join(impossible)} cannot happen with --stores={options.stores or NODES} "
            f"--dial-out-only={options.dial_out_only}: "
            f"{_needs(OF_ONE_STORE)} need --stores=1, {_needs(OF_SEVERAL_STORES)} need 2 or more of them or "
            f"--stores=nodes, {_needs([Kind.HOLDER_KILLED])} needs --stores=nodes, and "
            f"{_needs([Kind.RELAY_KILLED])} needs --dial-out-only=2 or more"
        )


def _stores(text: str) -> int:
    """Type of --stores."""
    number = 0 if text == NODES else int(text)
    if text != NODES and number < 1:
        raise ConfigError(f"--stores={number} must be 1 or more, or nodes")
    return number


def _needs(kinds: Sequence[Kind]) -> str:
    return ", ".join(kind.value for kind in kinds)


def require_own(config: RunConfig, cluster: LocalCluster) -> None:
    """Raise ConfigError if the configuration sets what this command sets for each node."""
    environment = cluster.environment("node0", 1)
    node, store_url = config.node, config.store.url
    found = {
        "run.dir": (str(config.run.dir.absolute()), str(cluster.run_dir.parent)),
        "run.id": (config.run.id, cluster.run_id),
        "store.url": (None if store_url is None else store_url.get_secret_value(), cluster.store_url),
        "node.id": (node.id, "node0"),
        "node.shm_dir": (str(node.shm_dir), environment.get("ZERO_BAND_NODE__SHM_DIR", "/dev/shm")),
    }
    if cluster.network is not None:
        found["node.advertise_host"] = (node.advertise_host, cluster.network.address("node0"))
    for key, (seen, needed) in found.items():
        if seen != needed:
            raise ConfigError(f"{key}: zeroband chaos sets it for each node; leave it out")
    if cluster.run_dir.is_dir() and any(cluster.run_dir.iterdir()):
        raise ConfigError(
            f"run.id={cluster.run_id!r}: {cluster.run_dir} already contains a run; leave run.id out or change it"
        )


def require_endless(config: RunConfig, options: ChaosOptions) -> None:
    """Raise ConfigError if the run may be complete before the end of the soak."""
    minutes = options.calm_minutes + options.minutes
    needed = math.ceil(_FASTEST_STEPS_PER_S * (60 * minutes + _AROUND_S))
    if config.train.total_steps < needed:
        raise ConfigError(
            f"train.total_steps={config.train.total_steps}: the run could be complete before the {minutes:g} minutes "
            f"of the soak are over; needed: {needed} or more: add --train.total-steps={max(needed, _ADVISED_STEPS)}"
        )
