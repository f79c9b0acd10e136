"""8 real nodes of which some lie, for bench/byzantine.py --nodes: what the honest ones come to, and whom they name.

A contribution is a lie by a custom outer algorithm (bench/liar.py); what only a hostile process can do, by a trainer
whose frames and votes are changed on their way out (tests/faults/liar.py).
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evidence import require

from zeroband.kernels.robust import RobustRule
from zeroband.observe.view import node_id_of_member
from zeroband.tools.cluster import LocalCluster, NodeProcess
from zeroband.tools.cluster.forked import ForkedNode
from zeroband.tools.cluster.local import TRAINER

ROOT = Path(__file__).parents[1]
HOSTILE_TRAINER = ROOT / "tests" / "faults" / "liar.py"
INNER_STEPS = 10
HOSTILE = ("withhold", "bytes", "vote")
"""Lies of the process: no contribution reaches another node; half of the nodes get other bytes of a mean than the rest;
another digest than the one that it holds."""
FIRST_LIE = 3
"""Round of the first of these; the others lie from the first round with inner steps on, which is 1."""
TINY = (
    *("--model.d-model", "32", "--model.n-layers", "1", "--model.n-heads", "2", "--model.d-ff", "64"),
    *("--data.seq-length", "32", "--train.dtype", "float32", "--train.threads", "1", "--train.batch-size", "4"),
    *("--train.micro-bs", "4", "--optim.warmup-steps", "5", "--optim.adamw.lr", "3e-3", "--comm.codec", "int8"),
    *("--comm.sites", "off", "--data.source.type", "synthetic", "--data.source.documents", "2000"),
    *("--data.hold-out", "0.1", "--outer.type", "custom", "--outer.algorithm", str(ROOT / "bench" / "liar.py")),
    *("--outer.inner-steps", str(INNER_STEPS), "--fault.detect-s", "4", "--observe.report", "false"),
)
HALF = 0.5
EVALUATION = ("--eval.every-steps", "1000000", "--eval.batches", "300")
"""Of the first node, at the end of the run alone."""


@dataclass(frozen=True)
class Ended:
    """A run of such nodes at its end, as its honest nodes recorded it."""

    loss: float
    """Held-out, in nats per token, of the state that they hold; not a number where they came to no end."""
    rounds: int
    """Committed by the first of them."""
    named: Mapping[str, int]
    """Liars that were put out or whose record was refused, with the rounds from their first lie to then."""
    doubted: Mapping[str, int]
    """Liars that the others count less than half, which is no proof, likewise."""
    accused: tuple[str, ...]
    """Honest nodes that were put out, or whose record was refused."""

    def __str__(self) -> str:
        said = [f"{self.rounds} rounds"]
        for what, found in (("named", self.named), ("doubted", self.doubted)):
            rounds = sorted(found.values())
            said += [f"{len(rounds)} {what} after {', '.join(map(str, rounds))}"] if rounds else []
        return "; ".join([*said, *(f"{node} ACCUSED" for node in self.accused)])


def train(
    rule: RobustRule | None,
    kind: str,
    honest: int,
    liars: int,
    seed: int,
    *,
    rounds: int,
    cache: Path,
    timeout_s: float,
) -> Ended:
    """Have so many nodes train for so many rounds, of which the last ones lie. `cache`: for the data of all runs."""
    names = [f"node{place}" for place in range(honest + liars)]
    arguments = [*TINY, "--run.seed", str(seed), "--train.total-steps", str(rounds * INNER_STEPS)]
    arguments += [] if rule is None else ["--outer.robust.type", rule.name]
    arguments += ["--outer.robust.trim", str(rule.trim)] if rule is not None and rule.name == "trimmed" else []
    is_hostile = kind in HOSTILE
    told = "none" if is_hostile else kind
    arguments += ["--outer.settings", json.dumps([f'lie="{told}"', f"honest={honest}"])]
    arguments += ["--comm.encryption", "false"] if is_hostile else []  # frames are changed as they are on the wire
    to = names[:honest] if kind == "withhold" else names[: len(names) // 2]
    env = {"LIES": kind, "LIES_TO": "" if kind == "vote" else " ".join(to), "LIES_FROM": str(FIRST_LIE)}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(
            *(Path(folder), [*arguments, "--data.cache-dir", str(cache)]),
            nodes=len(names),
            script=HOSTILE_TRAINER if is_hostile else TRAINER,
            env={"OMP_NUM_THREADS": "1", "TMPDIR": folder},
            node=ForkedNode,
        ) as cluster,
    ):
        for place, name in enumerate(names):
            more = EVALUATION if place == 0 else ()
            cluster.start(name, arguments=more, env=env if is_hostile and place >= honest else {})
        nodes = [cluster.nodes[name] for name in names]
        try:
            cluster.wait_until(lambda _: not any(node.is_running for node in nodes[:honest]), timeout_s=timeout_s)
        except TimeoutError:
            print(cluster.describe()[-3000:], flush=True)
        return _ended(nodes[:honest], nodes[honest:], FIRST_LIE if is_hostile else 1)


def _ended(honest: Sequence[NodeProcess], liars: Sequence[NodeProcess], first_lie: int) -> Ended:
    losses = [record["eval/loss"] for record in honest[0].metrics() if "eval/loss" in record]
    is_over = bool(losses) and all(node.exit_code == 0 for node in honest)
    events = [event for node in honest for event in node.events()]
    require(bool(events), "no node recorded anything")
    liar_ids, named, doubted, accused = {n.node_id for n in liars}, dict[str, int](), dict[str, int](), set[str]()
    for event in events:
        for node_id in _named(event):
            if node_id in liar_ids:
                named[node_id] = min(event["round"] - first_lie, named.get(node_id, event["round"]))
            else:
                accused.add(node_id)
    for node in liars:
        rounds = [record["outer/round"] for record in node.metrics() if record.get("outer/trust", 1.0) < HALF]
        if rounds:
            doubted[node.node_id] = min(rounds) - first_lie
    committed = max((e["round"] for e in honest[0].events("round_committed")), default=0)
    return Ended(losses[-1] if is_over else math.nan, committed, named, doubted, tuple(sorted(accused)))


def _named(event: Mapping[str, Any]) -> set[str]:
    """Nodes that an event names as the one at fault."""
    if event["kind"] == "blamed" and event["consequence"] == "out":
        return {node_id_of_member(member) for member in event["member_ids"]}
    return {node_id_of_member(event["member_id"])} if event["kind"] in ("record_refused", "payload_refused") else set()
