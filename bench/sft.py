"""E8: fine-tuning on conversations over nodes against one node with the same tokens: held-out loss, and counted bytes.

Conversations are made up by a seed: words that are reversed, sorted, counted, and small sums, some turns each. One node
takes the batch of all nodes in a step; the nodes exchange by DDP in float32, by DiLoCo in int8 and by DeMo. Each is
tried with all learning rates, and counts with its best.

    python bench/sft.py [--nodes 2] [--steps 800] [--inner-steps 20] [--lrs 1e-3,2e-3] [--chats 4000] [--seed 0]
    python bench/sft.py @sft.toml --steps 1000     # the model, tokenizer and first weights of a configuration
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence import count, finite, require

from zeroband.config.load import load_config
from zeroband.export.evaluation import Evaluation, evaluate_checkpoint
from zeroband.tools.cluster import LocalCluster

SYLLABLES = ("bdfgklmnprst", "aeiou", "klmnprst")
LIMIT_S = 7200.0
SAMPLES = 512

TASK = (
    *("--model.d-model", "96", "--model.n-layers", "3", "--model.n-heads", "4", "--model.tie-embeddings"),
    *("--data.seq-length", "256", "--train.batch-size", "8", "--train.micro-bs", "8", "--train.dtype", "float32"),
    *("--train.threads", "1", "--optim.warmup-steps", "40"),
)
"""Where no configuration is given."""

QUIET = ("--data.hold-out", "0.05", "--ckpt.every-rounds", "1000000", "--log-level", "WARNING")


@dataclass(frozen=True)
class Method:
    """A way of training, and whether nodes take part in it."""

    name: str
    flags: tuple[str, ...]
    has_nodes: bool = True


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    held_out: Evaluation
    targets: int
    """Tokens of the assistant that all nodes learned."""
    sent_bytes: int
    """Counted on one node: what it sent to the others."""


def methods_of(inner_steps: int) -> tuple[Method, ...]:
    """The methods, the one that the others are measured by first."""
    rounds = ("--outer.type", "diloco", "--outer.inner-steps", str(inner_steps), "--comm.codec", "int8")
    return (
        Method("one node, the batch of all", ("--outer", "none"), has_nodes=False),
        Method("DDP, float32", ("--outer.type", "ddp", "--comm.codec", "fp32")),
        Method(f"DiLoCo, int8, rounds of {inner_steps}", rounds),
        Method("DeMo, 4 of 4096 as signs", ("--outer.type", "demo", "--outer.k", "4", "--outer.decay", "0.999")),
    )


def chats(number: int, seed: int) -> Iterator[str]:
    """Lines of conversations, the same for a seed."""
    chance = random.Random(seed)
    for _ in range(number):
        messages: list[dict[str, str]] = []
        for _ in range(chance.randint(1, 4)):
            asked, answered = turn(chance)
            messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
        yield json.dumps({"messages": messages}) + "\n"


def turn(chance: random.Random) -> tuple[str, str]:
    """A task and its answer."""
    words = ["".join(chance.choice(letters) for letters in SYLLABLES) for _ in range(chance.randint(2, 4))]
    a, b = chance.randint(1, 49), chance.randint(1, 49)
    return chance.choice(
        [
            (f"reverse: {' '.join(words)}", " ".join(reversed(words))),
            (f"sort: {' '.join(words)}", " ".join(sorted(words))),
            (f"how many: {' '.join(words)}", str(len(words))),
            (f"{a}+{b}", str(a + b)),
        ]
    )


def train(folder: Path, arguments: Sequence[str], nodes: int) -> Run:
    """Train to the end, and evaluate what is left. Ends the program where a node fails."""
    alone = nodes == 1
    with LocalCluster(folder / "runs", arguments, nodes=nodes, alone=alone, env={"OMP_NUM_THREADS": "1"}) as cluster:
        for _ in range(nodes):
            cluster.start()
        codes = cluster.wait(timeout_s=LIMIT_S)
        require(set(codes.values()) == {0}, cluster.describe())
        require(not cluster.view().disagreements, "nodes held different states")
        records = [node.metrics() for node in cluster.nodes.values()]
        held_out = evaluate_checkpoint(str(folder / "ck" / cluster.run_id), torch.device("cpu"), samples=SAMPLES)
    sent_bytes = sum(int(record.get("outer/sent_bytes", 0)) for record in records[0])
    return Run(held_out, int(records[0][-1]["train/tokens"]), sent_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=count, default=2)
    parser.add_argument("--steps", type=count, default=800)
    parser.add_argument("--inner-steps", type=count, default=20)
    parser.add_argument("--lrs", default="1e-3,2e-3")
    parser.add_argument("--chats", type=count, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options, given = parser.parse_known_args()
    require(options.nodes > 1, "one node is compared with several; give --nodes 2 or more")
    lrs = [float(lr) for lr in options.lrs.split(",")]
    task = (*(TASK if not any(word.startswith("@") for word in given) else ()), *given)
    with tempfile.TemporaryDirectory(prefix="zeroband-bench-") as name:
        folder = Path(name)
        data = folder / "chats.jsonl"
        data.write_text("".join(chats(options.chats, options.seed)), encoding="utf-8")
        common = (
            *(*task, *QUIET, f"--train.total-steps={options.steps}", f"--ckpt.path={folder / 'ck'}"),
            *("--data.source.type=chat", f"--data.source.paths={data}", f"--data.cache-dir={folder / 'cache'}"),
        )
        batch = load_config([*common, "--outer=none"]).train.batch_size * options.nodes
        found: dict[str, tuple[float, Run]] = {}
        for method in methods_of(options.inner_steps):
            nodes = options.nodes if method.has_nodes else 1
            whole = () if method.has_nodes else (f"--train.batch-size={batch}",)
            runs = [
                (lr, train(folder, (*common, *method.flags, *whole, f"--optim.adamw.lr={lr}"), nodes)) for lr in lrs
            ]
            found[method.name] = min(runs, key=lambda run: run[1].held_out.loss)
            print("; ".join(f"{method.name}, lr {lr:g}: {run.held_out.loss:.4f}" for lr, run in runs), flush=True)
    show(found, options.nodes)


def show(found: dict[str, tuple[float, Run]], nodes: int) -> None:
    """Print the table: the first method is what losses, the second what bytes are measured by."""
    (_, alone), (_, ddp), *_ = found.values()
    print(f"\n{os.cpu_count()} cores, {nodes} nodes, {alone.held_out.targets} targets held out")
    print("| run | best lr | targets | held-out loss | of one node | bits per byte | bytes up, a target | of DDP |")
    print("|---|---|---|---|---|---|---|---|")
    for name, (lr, run) in found.items():
        loss = finite(run.held_out.loss, f"the loss of {name}")
        each, ratio = "", ""
        if run.sent_bytes:
            each, ratio = f"{run.sent_bytes * nodes / run.targets:.2f}", f"1/{ddp.sent_bytes / run.sent_bytes:.1f}"
        row = f"{loss:.4f} | {loss / alone.held_out.loss:.4f} | {run.held_out.bits_per_byte:.4f}"
        print(f"| {name} | {lr:g} | {run.targets} | {row} | {each} | {ratio} |")


if __name__ == "__main__":
    main()
