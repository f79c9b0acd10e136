"""Names for runs that nobody named: a date and two words, such as 2026-11-24-brave-otter. Pure but for the folder."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

from zeroband.config.schema import RunConfig
from zeroband.errors import ConfigError

AUTO = "auto"
"""The `run.id` that asks for a name."""

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


def new_run_name(directory: Path, *, now_s: float | None = None, draw: Callable[[], float] = random.random) -> str:
    """Make a name that no run in this folder has.

    `now_s`: wall clock, whose day in UTC begins the name; None: now. `draw`: numbers from 0 to below 1.
    """
    day = time.strftime("%Y-%m-%d", time.gmtime(now_s))
    words = len(ADJECTIVES) * len(NOUNS)
    first = int(draw() * words)
    for number in range(first, first + words):  # the next one where it is taken
        adjective, noun = divmod(number % words, len(NOUNS))
        name = f"{day}-{ADJECTIVES[adjective]}-{NOUNS[noun]}"
        if not (directory / name).exists():
            return name
    raise ConfigError(f"{directory} has a run for every name of {day}; set run.id")


def named(config: RunConfig, *, is_only_process: bool) -> RunConfig:
    """Give the run a name where its configuration asks for one. Raises ConfigError where others would have to know it.

    `is_only_process`: whether no other rank, and no start after this one, has to come to the same name by itself.
    """
    if config.run.id != AUTO:
        return config
    if not is_only_process:
        raise ConfigError(
            "run.id='auto' is no name yet, and each rank would find another: start them by zeroband launch with "
            "--run.id auto, which names the run for all of them"
        )
    if config.resume is not None and config.resume.path is None:
        raise ConfigError(
            "run.id='auto' is a new name at each start, which has no checkpoints to resume; name the run that "
            "--resume goes on with (`zeroband runs` shows them), or set resume.path"
        )
    waits_for = config.elastic.start_nodes
    if config.outer is not None and waits_for > 1:
        raise ConfigError(
            f"run.id='auto' founds a run of its own, and this one waits for {waits_for} nodes, each of which would do "
            "the same; give all of them one run.id"
        )
    run = config.run.model_copy(update={"id": new_run_name(config.run.dir)})
    return config.model_copy(update={"run": run})
