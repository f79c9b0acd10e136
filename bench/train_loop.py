"""What the training step costs beside a bare PyTorch loop: tokens/s of both, same model, same batch, one run.

Ours is the path of the trainer on one rank: `parallelize` (FSDP2 over a mesh of one, with bfloat16), `InnerOptimizer`
with its schedule, float32 loss as a sum, clipping over shards. The bare loop is the same `Transformer` unwrapped, with
`F.cross_entropy`, `torch.nn.utils.clip_grad_norm_` and fused `torch.optim.AdamW`. Steps alternate, so that both see
the same noise of the machine. On a machine that others use as well, believe the ratio of the best steps.

    python bench/train_loop.py [--steps 15] [--dtype float32|bfloat16] [--config configs/14M.toml]
"""

from __future__ import annotations

import argparse
import statistics
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from evidence import count, finite
from torch import Tensor
from torch.nn import functional as F

from zeroband.config.schema import CosineSchedule, ModelConfig, OptimConfig, TrainConfig
from zeroband.model import Transformer, gradient_scale, init_weights, next_token_loss, parameter_count
from zeroband.model.optim import InnerOptimizer
from zeroband.node.mesh import LocalMesh, clip_grad_norm_, init_local_mesh, make_room, parallelize

VOCAB_SIZE = 320
"""The byte tokenizer's 257 ids, padded to a multiple of 64."""
WARMUP_STEPS = 3
BARE, OURS = "bare PyTorch", "zeroband"
Step = Callable[[Tensor, Tensor], float]


@dataclass(frozen=True)
class Measured:
    median_s: float
    best_s: float
    loss: float


def our_step(config: ModelConfig, optim: OptimConfig, train: TrainConfig, mesh: LocalMesh) -> Step:
    """The trainer's inner step on one rank; gives the mean loss."""
    with torch.device("meta"):
        model = Transformer(config, VOCAB_SIZE)
    parallelize(model, train, mesh)
    make_room(model, mesh)
    init_weights(model, seed=0)
    optimizer = InnerOptimizer(model, optim, total_steps=train.total_steps)

    def step(tokens: Tensor, targets: Tensor) -> float:
        loss = next_token_loss(model(tokens), targets, z_loss=optim.z_loss)
        (loss.objective * gradient_scale(targets.numel(), mesh.world_size)).backward()
        clip_grad_norm_(model, optim.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.cross_entropy.item() / targets.numel()

    return step


def bare_step(config: ModelConfig, optim: OptimConfig, train: TrainConfig, device: torch.device) -> Step:
    """What one writes by hand for one device; bfloat16 through autocast, which is the usual way."""
    model = Transformer(config, VOCAB_SIZE).to(device)
    init_weights(model, seed=0)
    adamw = optim.adamw
    matrices, norms = ([p for p in model.parameters() if (p.ndim < 2) == is_norm] for is_norm in (False, True))
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": norms, "weight_decay": 0.0}],
        lr=adamw.lr, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, fused=True,
    )  # fmt: skip
    cast_to = torch.autocast(device.type, torch.bfloat16, enabled=train.dtype == "bfloat16")

    def step(tokens: Tensor, targets: Tensor) -> float:
        with cast_to:
            logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optim.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def timed(step: Step, tokens: Tensor, targets: Tensor) -> tuple[float, float]:
    """(seconds, loss) of one step; reading the loss waits for the device."""
    started_at_s = time.perf_counter()
    loss = step(tokens, targets)
    return time.perf_counter() - started_at_s, loss


def measure(loops: dict[str, Step], tokens: Tensor, targets: Tensor, steps: int) -> dict[str, Measured]:
    """Run all loops in turns, the first one changing."""
    took_s: dict[str, list[float]] = {name: [] for name in loops}
    losses: dict[str, float] = {}
    for index in range(WARMUP_STEPS + steps):
        for name in list(loops) if index % 2 else reversed(loops):
            seconds, losses[name] = timed(loops[name], tokens, targets)
            if index >= WARMUP_STEPS:
                took_s[name].append(seconds)
    return {name: Measured(statistics.median(took_s[name]), min(took_s[name]), losses[name]) for name in loops}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path(__file__).parent.parent / "configs" / "14M.toml")
    parser.add_argument("--steps", type=count, default=15, help="measured steps of each loop")
    parser.add_argument("--batch", type=count, default=4, help="sequences in a step")
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of both loops")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    config = ModelConfig.model_validate(tomllib.loads(args.config.read_text())["model"])
    train = TrainConfig(dtype=args.dtype, total_steps=10_000)
    optim = OptimConfig(warmup_steps=0, schedule=CosineSchedule(final_ratio=1.0))  # constant, as in the bare loop

    mesh = init_local_mesh()
    generator = torch.Generator().manual_seed(0)
    batch = torch.randint(0, VOCAB_SIZE, (args.batch, args.seq_length + 1), generator=generator).to(mesh.device)
    tokens, targets = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    loops = {BARE: bare_step(config, optim, train, mesh.device), OURS: our_step(config, optim, train, mesh)}
    results = measure(loops, tokens, targets, args.steps)
    mesh.close()

    print(
        f"{parameter_count(config, VOCAB_SIZE) / 1e6:.1f}M parameters, {args.batch} x {args.seq_length} tokens, "
        f"{args.dtype}, {mesh.device.type}, {args.threads} thread(s), torch {torch.__version__}, "
        f"{args.steps} steps each\n\n"
        "| loop | tokens/s, median | tokens/s, best | loss after | ratio of medians | of bests |\n"
        "|---|---|---|---|---|---|"
    )
    bare = results[BARE]
    for name, result in results.items():
        finite(result.loss, f"the loss of {name}")
        print(
            f"| {name} | {tokens.numel() / result.median_s:,.0f} | {tokens.numel() / result.best_s:,.0f} | "
            f"{result.loss:.5f} | {bare.median_s / result.median_s:.3f} | {bare.best_s / result.best_s:.3f} |"
        )


if __name__ == "__main__":
    main()
