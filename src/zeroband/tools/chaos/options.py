"""What `zeroband chaos` is asked for, and what it refuses before anything starts: soaks that could show nothing."""

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
"""Steps a second that no node makes: a run of fewer steps may be complete before the soak is over."""
_ADVISED_STEPS = 100_000_000
_AROUND_S = 600.0
"""Time for what comes before and after the timed phases."""


@dataclass(frozen=True)
class ChaosOptions:
    """What to run, and for how long."""

    arguments: tuple[str, ...]
    """Arguments that every node gets: `@config.toml --section.key value`."""
    nodes: int = 8
    mtbf_s: float = 20.0
    """Mean time between two faults of the whole run."""
    minutes: float = 10.0
    baseline_minutes: float | None = None
    """Undisturbed before that. None: a fifth of `minutes`."""
    seed: int = 1
    stores: int = 1
    """Number of stores, of which the run uses one at a time; 0: each node holds one."""
    dial_out_only: int = 0
    """Nodes that others cannot dial, the last ones."""
    kinds: tuple[Kind, ...] = ()
    """Faults to draw from; none: all that can happen to such a run."""
    keep_undisturbed: int = 2
    slack_s: float = 10.0
    """What a fault may cost the others beyond fault.detect_s; a few seconds, and more on cores that all nodes share."""
    is_host_shared: bool = False
    """Whether other work keeps the processors busy, so that nodes that start would wait behind it for minutes."""
    directory: Path = Path("runs")
    """run.dir of every node."""
    run_id: str | None = None
    """Name of the run; None: LocalCluster makes one."""

    @property
    def calm_minutes(self) -> float:
        return self.minutes / 5 if self.baseline_minutes is None else self.baseline_minutes

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all nodes."""
        return tuple(f"node{number}" for number in range(self.nodes))

    @property
    def dial_out_only_nodes(self) -> tuple[str, ...]:
        """Names of the nodes that others cannot dial."""
        return self.names[self.nodes - self.dial_out_only :]

    @property
    def wanted_kinds(self) -> tuple[Kind, ...]:
        """Faults to draw from."""
        return self.kinds or kinds_of(stores=self.stores, dial_out_only=self.dial_out_only)

    @property
    def in_peace(self) -> int:
        """Nodes that are left in peace: with several stores more than half, which alone may go to another store."""
        return max(self.keep_undisturbed, self.nodes // 2 + 1 if self.stores != 1 else 0)

    @property
    def command(self) -> str:
        """What has the same faults strike the same nodes again."""
        given = [text for flag, name, _ in _NUMBERS for text in (flag, f"{getattr(self, name):g}")]
        given += ["--baseline-minutes", f"{self.calm_minutes:g}", "--stores", str(self.stores or NODES)]
        given += ["--shared-host"] if self.is_host_shared else []
        kinds = ["--kinds", ",".join(kind.value for kind in self.kinds)] if self.kinds else []
        return shlex.join(["zeroband", "chaos", *self.arguments, *given, *kinds])


_NUMBERS = (
    ("--nodes", "nodes", "how many train together"),
    ("--mtbf-s", "mtbf_s", "mean gap of faults"),
    ("--minutes", "minutes", "with faults"),
    ("--seed", "seed", "of the faults"),
    ("--dial-out-only", "dial_out_only", "nodes that cannot be dialled"),
    ("--keep-undisturbed", "keep_undisturbed", "nodes left in peace; with several stores more than half at least"),
    ("--slack-s", "slack_s", "beyond fault.detect_s before a node counts as hanging"),
)
"""Flags that set a number of the options, by its name."""


def read_options(argv: Sequence[str]) -> tuple[ChaosOptions, Path | None]:
    """What is asked for, and the file for the report. Raises ConfigError."""
    known, arguments = _parser().parse_known_args(argv)
    if not any(argument.startswith("@") for argument in arguments):
        arguments.insert(0, f"@{_CONFIG}")
    directory, run_id = asked_run(arguments, f"chaos-{os.getpid()}")
    given: dict[str, Any] = vars(known) | {"kinds": _kinds(known.kinds)}
    report = given.pop("report")
    return ChaosOptions(tuple(arguments), directory=directory, run_id=run_id, **given), report


def _kinds(text: str | None) -> tuple[Kind, ...]:
    """The kinds that are named. Raises ConfigError."""
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
        "Several nodes on this machine train together while faults strike them and their store at random; "
        f"settings: configs/{_CONFIG.name}, or the file that is given, and over it the --section.key given here.",
        usage="zeroband chaos [@file.toml ...] [options] [--section.key value ...]",
    )
    for flag, name, what in _NUMBERS:
        value = getattr(default, name)
        parser.add_argument(flag, type=type(value), default=value, help=f"{what}, default: %(default)s")
    parser.add_argument("--baseline-minutes", type=float, help="undisturbed before, default: a fifth of --minutes")
    parser.add_argument(
        "--stores",
        type=_stores,
        default=default.stores,
        help="of which one is in use, default: %(default)s; nodes: each node holds one",
    )
    parser.add_argument("--kinds", help="kinds of faults with commas between them, default: all that are possible")
    parser.add_argument(
        "--shared-host",
        dest="is_host_shared",
        action="store_true",
        help="nodes start at the usual priority, since others keep this host busy",
    )
    parser.add_argument("--report", type=Path, help="file for the report, which is printed as well")
    return parser


def require_soak(options: ChaosOptions) -> None:
    """Raise ConfigError for numbers that make no soak, or one that has nothing to show."""
    times = {
        "--mtbf-s": options.mtbf_s,
        "--minutes": options.minutes,
        "--baseline-minutes": options.calm_minutes,
        "--slack-s": options.slack_s,
    }
    for name, value in times.items():
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value:g} must be above 0: without it a soak has nothing to show")
    if not 1 <= options.keep_undisturbed <= options.nodes or options.nodes < 2:
        raise ConfigError(
            f"--nodes={options.nodes} must be 2 or more, and at least --keep-undisturbed={options.keep_undisturbed}, "
            "which must be 1 or more: somebody has to be there to notice a fault"
        )
    if not 0 <= options.dial_out_only < options.nodes:
        raise ConfigError(
            f"--dial-out-only={options.dial_out_only} must be 0 or more, and fewer than --nodes={options.nodes}: "
            "somebody must be there who can be dialled"
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
    """Raise ConfigError where the nodes would write, meet or be found elsewhere than this command looks."""
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
            raise ConfigError(
                f"{key}: zeroband chaos sets it for each node, since it starts and watches all of them; leave it out"
            )
    if cluster.run_dir.is_dir() and any(cluster.run_dir.iterdir()):
        raise ConfigError(
            f"run.id={cluster.run_id!r}: {cluster.run_dir} holds a run already, and a soak judges only its own; "
            "leave run.id out, or give another one"
        )


def require_endless(config: RunConfig, options: ChaosOptions) -> None:
    """Raise ConfigError where the run may be complete before the soak is over: nodes that end are no faults."""
    minutes = options.calm_minutes + options.minutes
    needed = math.ceil(_FASTEST_STEPS_PER_S * (60 * minutes + _AROUND_S))
    if config.train.total_steps < needed:
        raise ConfigError(
            f"train.total_steps={config.train.total_steps}: the run could be complete before the {minutes:g} minutes "
            f"of the soak are over, and its nodes would end by themselves; needed: {needed} or more, so that it never "
            f"is: add --train.total-steps={max(needed, _ADVISED_STEPS)}"
        )
