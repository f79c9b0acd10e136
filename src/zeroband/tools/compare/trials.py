"""A planned run: method, learning rate and seed; its flags, and the digest of all it depends on."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import zeroband
from zeroband.config.load import load_config
from zeroband.config.outer import CustomConfig, RoundsConfig
from zeroband.config.schema import RunConfig
from zeroband.tools.compare.methods import NO_STORE, Arm, digest_of_algorithm, flags_of
from zeroband.tools.compare.options import CompareOptions
from zeroband.tools.compare.results import FORMAT

WARM_SEED = 271828
"""Seed of the common start's data, so that no run starts with the samples that it has just seen."""

_OF_THIS_MACHINE = ("run.dir", "run.id", "run.token", "data.cache_dir", "train.init_from", "ckpt.path", "ckpt.retry_s")
_SECTIONS_OF_THIS_MACHINE = ("node", "store", "observe", "export", "resume", "log_level")
_CODE = (".py", ".cpp", ".h", ".inl")
_ONLY_LOOKS = (
    *("cli.py", "observe/", "runtime/report.py", "tools/ctl.py"),
    *(f"tools/{name}/" for name in ("chaos", "compare", "demo", "doctor", "plan")),
)
_QUIET = ("--export=none", "--resume=none", "--observe.sample-prompt=none", "--observe.wandb=none")


@dataclass(frozen=True)
class Trial:
    """A planned run."""

    arm: Arm
    lr: float
    seed: int
    nodes: int
    arguments: tuple[str, ...]
    """Arguments of every node, without output paths."""
    config: RunConfig
    digest: str

    @property
    def run_id(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', self.arm.name)[:32]}-{self.lr:g}-{self.seed}-{self.digest[:10]}"

    @property
    def name(self) -> str:
        """Names it among the runs of its comparison, as a name of a file."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.arm.name}-lr-{self.lr:g}-seed-{self.seed}")

    @property
    def work(self) -> int:
        """Samples trained by all nodes."""
        return self.nodes * self.config.train.total_steps * self.config.train.batch_size


def trial(options: CompareOptions, arm: Arm, lr: float, seed: int, *, start: str, texts: str = "") -> Trial:
    """Plan a run. `start`, `texts`: digests of the common start and of split text. Raises ConfigError."""
    nodes = options.nodes_of(arm)
    batch = [] if options.global_batch is None else [f"--train.batch-size={options.global_batch // nodes}"]
    chosen = flags_of(arm, nodes=nodes, inner_steps=options.inner_steps)
    common = [
        *options.arguments,
        *_QUIET,
        *(f"--run.seed={seed}", f"--optim.adamw.lr={lr!r}", "--ckpt.keep-last=100000"),
        *(f"--elastic.start-nodes={nodes}", f"--elastic.min-nodes={nodes}"),
        *batch,
        *chosen,
    ]
    config = load_config(common, {} if arm.is_alone else NO_STORE)
    arguments = (*common, f"--ckpt.every-rounds={_rounds_between(config, options.points)}")
    config = load_config(arguments, {} if arm.is_alone else NO_STORE)
    custom = digest_of_algorithm(config.outer) if isinstance(config.outer, CustomConfig) else ""
    about = {"start": start, "samples": options.samples, "algorithm": custom}
    about |= {"code": code_digest()} if options.results is None else {}
    digest = digest_of(config, nodes, about, texts=texts)
    return Trial(arm, lr, seed, nodes, arguments, config, digest)


def warm_up(options: CompareOptions, *, texts: str = "") -> tuple[tuple[str, ...], str]:
    """Return flags and digest of the common start: one node with the batch of all. `texts`: as in `trial`."""
    base = load_config(options.arguments, {})
    lr = base.optim.adamw.lr if options.warm_lr is None else options.warm_lr
    batch = options.global_batch or options.nodes * base.train.batch_size
    arguments = (
        *options.arguments,
        *_QUIET,
        *(f"--train.total-steps={options.warm_steps}", f"--train.batch-size={batch}", f"--optim.adamw.lr={lr!r}"),
        *(f"--run.seed={WARM_SEED}", f"--ckpt.every-rounds={options.warm_steps}"),
    )
    return arguments, digest_of(load_config(arguments, {}), 1, {"code": code_digest()}, texts=texts)


def _rounds_between(config: RunConfig, points: int) -> int:
    """Return the rounds between checkpoints for evaluation.

    With overlapping updates, a checkpoint makes all nodes wait, which changes the run; hence few points.
    """
    outer = config.outer
    steps = 1 if outer is None else outer.round_steps or 1
    fragments = outer.fragments if isinstance(outer, RoundsConfig) else 1
    return max(1, round(config.train.total_steps / steps * fragments / points))


def digest_of(config: RunConfig, nodes: int, about: Mapping[str, Any], *, texts: str = "") -> str:
    """Return the digest of all that a result depends on, without machine and output paths. `texts`: as in `trial`."""
    # a key that a later version adds changes no result where it is not set
    plain = config.model_dump(mode="json", exclude=set(_SECTIONS_OF_THIS_MACHINE), exclude_defaults=True)
    for key in _OF_THIS_MACHINE:
        section, _, name = key.partition(".")
        plain.get(section, {}).pop(name, None)
    if texts:
        plain["data"] |= {"source": texts, "sources": None}
    given = {name: section for name, section in plain.items() if section}
    record = {"format": FORMAT, "nodes": nodes, "config": given, **about}
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()[:32]


@cache
def code_digest() -> str:
    """Return the digest of the code that affects training; observers and other commands are left out."""
    root, seen = Path(zeroband.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.suffix in _CODE and not name.startswith(_ONLY_LOOKS):
            seen.update(f"{name}\0".encode() + path.read_bytes())
    return seen.hexdigest()[:32]


def shared_folder(name: str) -> Path:
    """Return a folder that all comparisons share as a cache."""
    return Path(os.environ.get("ZERO_BAND_RUN__DIR", "runs")) / f"compare-{name}"
