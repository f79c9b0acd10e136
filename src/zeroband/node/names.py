"""The names of a node and of its run; generated ones have a date and two words, such as 2026-11-24-brave-otter."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from pathlib import Path

from zeroband.config.schema import RunConfig
from zeroband.errors import ConfigError
from zeroband.observe.metrics import METRICS_FILE
from zeroband.observe.process_stat import started_at_ticks

AUTO = "auto"
"""The `run.id` that requests a generated name."""

_SHOWN = 3
"""Most run names in a message."""

ADJECTIVES = (
    *("able", "alert", "amber", "ample", "azure", "bold", "brave", "breezy", "bright", "brisk"),
    *("calm", "candid", "careful", "cheerful", "clear", "clever", "cosmic", "crisp", "curious", "daring"),
    *("eager", "early", "earnest", "easy", "faithful", "famous", "fancy", "fearless", "festive", "fluent"),
    *("frank", "fresh", "friendly", "frosty", "gentle", "giant", "glad", "golden", "graceful", "grand"),
    *("green", "happy", "hardy", "hasty", "hearty", "honest", "humble", "jolly", "keen", "kind"),
    *("lively", "loyal", "lucky", "lunar", "mellow", "merry", "mighty", "modest", "neat", "nimble"),
    *("noble", "patient", "placid", "plucky", "polite", "prompt", "proud", "purple", "quick", "quiet"),
    *("rapid", "ready", "royal", "rustic", "sandy", "scarlet", "serene", "sharp", "shiny", "silent"),
    *("silver", "simple", "smart", "snowy", "solar", "solid", "spicy", "stable", "steady", "sturdy"),
    *("sunny", "swift", "tidy", "tranquil", "trusty", "upbeat", "valiant", "velvet", "vivid", "warm"),
    *("wise", "witty", "young", "zesty"),
)
NOUNS = (
    *("acorn", "anchor", "antelope", "apple", "arrow", "aspen", "badger", "balloon", "banjo", "beacon"),
    *("bear", "beaver", "birch", "bison", "breeze", "bridge", "brook", "camel", "canoe", "canyon"),
    *("cedar", "cello", "cherry", "cloud", "clover", "comet", "compass", "condor", "coral", "cricket"),
    *("dolphin", "dragon", "eagle", "ember", "falcon", "fern", "ferry", "finch", "forest", "fox"),
    *("galaxy", "garden", "gazelle", "geyser", "glacier", "harbor", "hazel", "heron", "island", "ivy"),
    *("jaguar", "kayak", "kite", "lagoon", "lantern", "lark", "laurel", "lemon", "lily", "lion"),
    *("lynx", "maple", "marble", "meadow", "meteor", "moose", "mountain", "oak", "ocean", "olive"),
    *("orchid", "otter", "owl", "panda", "pebble", "pelican", "penguin", "pepper", "piano", "pine"),
    *("planet", "plum", "poppy", "prairie", "puffin", "rabbit", "raven", "reef", "river", "robin"),
    *("rocket", "salmon", "sparrow", "spruce", "squirrel", "stork", "summit", "swallow", "thistle", "tiger"),
    *("tulip", "tundra", "turtle", "valley", "violin", "walnut", "walrus", "willow", "wombat", "zebra"),
)


def node_id_of(config: RunConfig) -> str:
    """Return the node's name for the life of the run; the host name by default."""
    return config.node.id or socket.gethostname()


def node_dir_of(config: RunConfig) -> Path:
    """Return `<run.dir>/<run.id>/<node id>`."""
    return config.run.dir / config.run.id / node_id_of(config)


def new_run_name(
    directory: Path | None, *, now_s: float | None = None, draw: Callable[[], float] = random.random
) -> str:
    """Generate a name that no run in this folder has; None: do not check.

    `now_s`: wall clock of the name's date, in UTC; None: now. `draw`: random numbers in [0, 1).
    """
    day = time.strftime("%Y-%m-%d", time.gmtime(now_s))
    words = len(ADJECTIVES) * len(NOUNS)
    first = int(draw() * words)
    for number in range(first, first + words):  # take the next free one
        adjective, noun = divmod(number % words, len(NOUNS))
        name = f"{day}-{ADJECTIVES[adjective]}-{NOUNS[noun]}"
        if directory is None or not (directory / name).exists():
            return name
    raise ConfigError(f"{directory} has a run for every name of {day}; set run.id")


def named(config: RunConfig, *, is_only_process: bool) -> RunConfig:
    """Generate the run's name if run.id is auto, or unset in a run of one node.

    `is_only_process`: without it, ranks derive one name from their launcher, also after a restart. Raises ConfigError
    if other nodes, or a later start, would need the name.
    """
    is_unnamed = "id" not in config.run.model_fields_set
    if config.run.id != AUTO and not (is_unnamed and config.outer is None):
        return config
    if config.resume is not None and config.resume.path is None:
        raise ConfigError(
            f"--resume needs the name of a run: --run.id NAME, {_known_names(config.run.dir)}. Without one, a new run "
            "starts, which has no checkpoints; resume.path names those of another run"
        )
    waits_for = config.elastic.start_nodes
    if config.outer is not None and waits_for > 1:
        raise ConfigError(
            f"run.id='auto' founds a new run on each node, and this one waits for {waits_for} nodes; give all of them "
            "one run.id"
        )
    name = new_run_name(config.run.dir) if is_only_process else _name_by_launcher()
    return config.model_copy(update={"run": config.run.model_copy(update={"id": name})})


def _known_names(directory: Path) -> str:
    """Name the newest runs of a folder."""
    runs = {path.parents[1]: path.stat().st_mtime for path in sorted(directory.glob(f"*/*/{METRICS_FILE}"))}
    names = ", ".join(run.name for run in sorted(runs, key=runs.__getitem__, reverse=True)[:_SHOWN])
    return f"where {directory} has {names}" if names else f"and {directory} has none yet"


def _name_by_launcher() -> str:
    """Derive a name from the parent's process id and start time, equal in all of its children."""
    parent = os.getppid()
    began_s = _boot_s() + (started_at_ticks(parent) or 0) / os.sysconf("SC_CLK_TCK")
    return new_run_name(None, now_s=began_s, draw=random.Random(f"{parent} {began_s}").random)


def _boot_s() -> int:
    """Return the boot time of this machine; 0 if unknown."""
    try:
        lines = Path("/proc/stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("btime ")), 0)
