"""What the training step costs beside a bare PyTorch loop and transformers' Llama: tokens/s and memory, in one run.

zeroband         the trainer's own loop on one rank, as `zeroband train` runs it: loader, documents, micro-batches
bare PyTorch     the same decoder, and what one writes by hand: autocast, F.cross_entropy of all logits, AdamW
transformers     its Llama in the bare loop, with positions that begin anew at each document
no compile, all logits, masked attention, float8: zeroband's loop with one feature off, or on

Each loop is a process of its own and gets the same batches; those by hand have them in memory beforehand. They run in
turns, the first one changing, so that all see the same noise of the machine: a step at a time on a CPU, several on a
GPU, whose queue then never runs empty. On a machine that others use as well, believe the ratio of the best turns.

A loop's row is printed when the loop ends; one that dies is a row that says why. Ends with 1 where a loop died or an
aim that was asked for (--least-ratio, --least-mfu, --memory-within) is missed.

    python bench/train_loop.py [--loops zeroband "bare PyTorch" transformers] [--turns 15] [@FILE.toml] [--KEY VALUE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch
from evidence import count, finite, require_known
from torch import Tensor, nn
from torch.nn import functional as F

from zeroband.checks.gpu_prediction import GpuRun, predict_gpu
from zeroband.checks.needs import Needs
from zeroband.config import RunConfig, load_config
from zeroband.config.model import LlamaConfig
from zeroband.data.loader import MicroBatch
from zeroband.data.tokenizer import tokenizer_of
from zeroband.elastic.membership.departure import Departure
from zeroband.model import Transformer, attend_plain, blueprint, flops_per_token, init_weights, parameter_count
from zeroband.model import loss as loss_module
from zeroband.node.mesh import LocalMesh, init_local_mesh
from zeroband.observe.hardware import peak_flops
from zeroband.runtime.build import TrainerParts, build_trainer
from zeroband.runtime.checkpointing import Checkpointing
from zeroband.runtime.loop import Training, open_run, train_round
from zeroband.runtime.report import InnerStep, Report

OURS, BARE, LLAMA = "zeroband", "bare PyTorch", "transformers"
DEFAULTS = {
    "model.d_model": 384, "model.n_layers": 8, "model.n_heads": 6, "model.d_ff": 1024,
    "data.source": {"type": "synthetic", "documents": 3000, "mean_length": 700},
    "data.seq_length": 1024, "data.hold_out": 0.0,
    "train.batch_size": 4, "train.micro_bs": 2, "train.dtype": "float32", "train.threads": 1,
    "train.total_steps": 100_000, "optim.warmup_steps": 0, "optim.schedule.final_ratio": 1.0,
}  # fmt: skip
"""The model of configs/14M.toml, and a constant learning rate, as the loops by hand have it."""

WARM_UP_STEPS = 3
Steps = Iterator[float]
"""Makes one inner step each time, and gives its mean loss: of the step before where that is what the loop knows."""


@dataclass(frozen=True)
class Turn:
    """What a loop says of one turn."""

    took_s: float
    loss: float
    peak_bytes: int
    """Memory of the GPU, or of the process, up to here."""


def ours(config: RunConfig, mesh: LocalMesh, told: Callable[[float], None]) -> None:
    """Train as the trainer does, and tell each step's loss; ends by what `told` raises."""

    class Teller(Report):
        def step_done(self, made: InnerStep) -> None:
            told(made.loss)

    with ExitStack() as stack:
        node = build_trainer(config, mesh, Departure(config.fault.grace_s))
        report = Teller()
        world, joiner = open_run(node, report, stack)
        joiner.enter()
        while True:
            train_round(Training(node, world, joiner, Checkpointing(), report))


def batches_of(node: TrainerParts, steps: int) -> list[list[MicroBatch]]:
    """The batches that the trainer would get, on the device."""
    node.loader.assign([(0, steps * node.config.train.batch_size)])
    return [[batch.to(node.local.device) for batch in node.loader.next_step()] for _ in range(steps)]


def by_hand(
    node: TrainerParts, model: nn.Module, logits_of: Callable[[MicroBatch], Tensor], batches: Sequence[list[MicroBatch]]
) -> Steps:
    """What one writes by hand for one device; bfloat16 through autocast, which is the usual way."""
    config, adamw = node.config, node.config.optim.adamw
    matrices, norms = ([p for p in model.parameters() if (p.ndim < 2) == is_norm] for is_norm in (False, True))
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": norms, "weight_decay": 0.0}],
        lr=adamw.lr, betas=adamw.betas, eps=adamw.eps, weight_decay=adamw.weight_decay, fused=True,
    )  # fmt: skip
    cast_to = torch.autocast(node.local.device.type, torch.bfloat16, enabled=config.train.dtype == "bfloat16")
    for micro_batches in batches:
        total = torch.zeros((), device=node.local.device)
        for batch in micro_batches:
            with cast_to:
                logits = logits_of(batch)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets.flatten()) / len(micro_batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip_norm or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        yield total.item()


def shape_of(config: RunConfig) -> LlamaConfig:
    """The decoder's shape: what is measured here trains no other model."""
    assert isinstance(config.model, LlamaConfig)
    return config.model


def bare(node: TrainerParts, batches: Sequence[list[MicroBatch]]) -> Steps:
    attend = cast(Any, node.model).layers[0].self_attn.attend
    model = Transformer(shape_of(node.config), node.tokenizer.padded_vocab_size, attend)
    init_weights(model, seed=node.config.run.seed)
    model.to(node.local.device)
    run = torch.compile(model) if is_compiled(node) else model
    return by_hand(node, model, lambda batch: run(batch.tokens, batch.cu_seqlens), batches)


def llama(node: TrainerParts, batches: Sequence[list[MicroBatch]]) -> Steps:
    import transformers

    shape, vocab_size = shape_of(node.config), node.tokenizer.padded_vocab_size
    config = cast(Any, transformers.LlamaConfig)(  # its signature names only a part of its arguments
        hidden_size=shape.d_model, num_hidden_layers=shape.n_layers, num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.ff_width, vocab_size=vocab_size,
        rms_norm_eps=shape.norm_eps, rope_theta=shape.rope_theta, tie_word_embeddings=shape.tie_embeddings,
        max_position_embeddings=node.config.data.seq_length, attn_implementation="sdpa",
    )  # fmt: skip
    model = cast(nn.Module, transformers.LlamaForCausalLM(config))
    start = Transformer(shape, vocab_size)
    init_weights(start, seed=node.config.run.seed)
    named = start.state_dict().items()
    model.load_state_dict({name if name.startswith("lm_head") else f"model.{name}": p for name, p in named})
    model.to(node.local.device)
    run = torch.compile(model) if is_compiled(node) else model

    def logits_of(batch: MicroBatch) -> Tensor:
        return run(batch.tokens, position_ids=positions_of(batch), use_cache=False).logits

    return by_hand(node, model, logits_of, batches)


def positions_of(batch: MicroBatch) -> Tensor:
    """Each token's place in its document, from which transformers sees where documents are packed. Shape (b, t)."""
    starts = batch.cu_seqlens
    places = torch.arange(batch.tokens.numel(), device=batch.tokens.device)
    if starts is None:
        return (places % batch.tokens.shape[1]).view(batch.tokens.shape)
    begins = starts[torch.bucketize(places, starts[1:], right=True)]
    return (places - begins).view(batch.tokens.shape)


def is_compiled(node: TrainerParts) -> bool:
    compiles = node.config.train.compile
    return node.local.device.type == "cuda" if compiles is None else compiles


def replaced(module: ModuleType, name: str, value: object) -> Mapping[str, Any]:
    """Have a module use another value; no key of the configuration changes."""
    assert hasattr(module, name), f"{module.__name__} has no {name}"
    setattr(module, name, value)
    return {}


VARIANTS: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    OURS: dict,
    "no compile": lambda: {"train.compile": False},
    "all logits": lambda: replaced(loss_module, "LOGITS_BYTES", 1 << 60),
    "masked attention": lambda: replaced(blueprint, "attention_on", lambda *_: (attend_plain, "")),
    "float8": lambda: {"train.float8": "tensorwise"},
}
"""Loops of the trainer, and what is changed for them."""

LOOPS = (*VARIANTS, BARE, LLAMA)


class Over(Exception):
    """The parent wants no more turns."""


def config_of(arguments: Sequence[str], changes: Mapping[str, Any], folder: str) -> RunConfig:
    """The configuration of a loop: what was asked for, and the defaults below it where no file was named.

    The learning rate does not warm up, since the loops by hand have a constant one.
    """
    given = {word.partition("=")[0].removeprefix("--").replace("-", "_") for word in arguments}
    below = {} if any(word.startswith("@") for word in arguments) else DEFAULTS
    asked = {**{key: value for key, value in below.items() if key not in given}, **changes}
    asked |= {"run.dir": folder, "outer": "none", "observe.log_every_steps": 1 << 30, "optim.warmup_steps": 0}
    flags = [f"--{key}={json.dumps(v) if isinstance(v, dict | bool) else v}" for key, v in asked.items()]
    return load_config([*arguments, *flags])


def work(loop: str, arguments: Sequence[str]) -> None:
    """One loop in this process: a line with a number on stdin asks for so many steps, a line of JSON answers."""
    changes = VARIANTS[loop]() if loop in VARIANTS else {}
    with tempfile.TemporaryDirectory() as folder:
        config, mesh = config_of(arguments, changes, folder), init_local_mesh()
        turns = Turns(mesh.device)
        try:
            if loop in VARIANTS:
                ours(config, mesh, turns.told)
            else:
                node = build_trainer(config, mesh, Departure(config.fault.grace_s))
                steps = int(sys.stdin.readline())
                for loss in (bare if loop == BARE else llama)(node, batches_of(node, steps)):
                    turns.told(loss)
        except Over:
            pass
        finally:
            mesh.close()


class Turns:
    """Counts the steps of a loop, and stops it between two turns."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._left, self._from_s = device, WARM_UP_STEPS, 0.0

    def told(self, loss: float) -> None:
        self._left -= 1
        if self._left:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"took_s": time.perf_counter() - self._from_s, "loss": loss, "peak_bytes": peak}), flush=True)
        asked = sys.stdin.readline()
        if not asked.strip():
            raise Over
        self._left, self._from_s = int(asked), time.perf_counter()


class LoopDied(Exception):
    """The process of a loop ended before its time. The message is the last line that it wrote."""


class Loop:
    """A loop in a process of its own, which has warmed up. Raises LoopDied."""

    def __init__(self, name: str, arguments: Sequence[str], steps: int) -> None:
        command = [sys.executable, __file__, "--work", name, *arguments]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process; a full pipe would block it
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        self.name = name
        if name not in VARIANTS:
            self._ask(steps)
        self._answer()  # the warm-up

    def take_turn(self, steps: int) -> Turn:
        self._ask(steps)
        return self._answer()

    def close(self) -> None:
        with self._errors, self._process as process:
            assert process.stdin is not None and process.stdout is not None
            with suppress(BrokenPipeError):
                process.stdin.close()

    def _ask(self, number: int) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # its answer will be missing
            self._process.stdin.write(f"{number}\n")
            self._process.stdin.flush()

    def _answer(self) -> Turn:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return Turn(**json.loads(line))
        code = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read()
        sys.stderr.write(said[-4000:])
        last = [line.strip() for line in said.splitlines() if line.strip()][-1:]
        raise LoopDied(f"exit code {code}: {''.join(last)[:200]}")


def parse_args() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--loops", nargs="+", default=[OURS, BARE, LLAMA], help=", ".join(LOOPS))
    parser.add_argument("--turns", type=count, default=15, help="measured turns of each loop")
    parser.add_argument("--steps", type=count, default=10 if torch.cuda.is_available() else 1, help="of a turn")
    parser.add_argument(
        "--together",
        action=argparse.BooleanOptionalAction,
        default=not torch.cuda.is_available(),
        help="all loops at a time, in turns; else one after the other, where they do not fit together",
    )
    parser.add_argument("--least-ratio", type=float, help="aim: tokens/s over those of the faster loop by hand")
    parser.add_argument("--least-mfu", type=float, help="aim: model FLOPs utilisation, 0 to 1")
    parser.add_argument("--memory-within", type=float, help="aim: error of the predicted memory, uncompiled, 0 to 1")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options, rest = parser.parse_known_args()
    require_known(parser, options.loops, LOOPS)
    return options, rest


@dataclass(frozen=True)
class Measured:
    """A loop's turns, or why it died."""

    name: str
    turns: Sequence[Turn]
    failed: str = ""

    @property
    def median_s(self) -> float:
        return statistics.median(turn.took_s for turn in self.turns)

    @property
    def best_s(self) -> float:
        return min(turn.took_s for turn in self.turns)


def measure(options: argparse.Namespace, arguments: Sequence[str]) -> Iterator[list[Measured]]:
    """Run the loops, and yield those that have ended: those by hand first, which the others are compared with."""
    steps = WARM_UP_STEPS + options.turns * options.steps
    names = sorted(options.loops, key=lambda name: name in VARIANTS)
    by_hand = [name for name in names if name not in VARIANTS]
    if options.together:
        yield run_together(names, options, arguments, steps)
        return
    yield [one for name in by_hand for one in run_together([name], options, arguments, steps)]
    for name in names[len(by_hand) :]:
        yield run_together([name], options, arguments, steps)


def run_together(
    names: Sequence[str], options: argparse.Namespace, arguments: Sequence[str], steps: int
) -> list[Measured]:
    """Have loops take turns, the first one changing. One that dies is left out from there on."""
    turns: dict[str, list[Turn]] = {name: [] for name in names}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        running: list[Loop] = []
        for name in names:
            try:
                running.append(Loop(name, arguments, steps))
                stack.callback(running[-1].close)
            except LoopDied as error:
                failed[name] = str(error)
        for turn in range(options.turns):
            for loop in list(running if turn % 2 else reversed(running)):
                try:
                    turns[loop.name].append(loop.take_turn(options.steps))
                except LoopDied as error:
                    failed[loop.name] = str(error)
                    running.remove(loop)
    return [Measured(name, turns[name], failed.get(name, "")) for name in names]


class Table:
    """The rows of the loops, printed as they come, and what they are held to."""

    def __init__(self, config: RunConfig, options: argparse.Namespace) -> None:
        self._vocab_size = tokenizer_of(config.data).padded_vocab_size
        self._config, self._options, self._rows = config, options, dict[str, Measured]()
        self._tokens = options.steps * config.train.batch_size * config.data.seq_length
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._by_hand: list[Measured] = []
        print(
            f"{parameter_count(config.model, self._vocab_size) / 1e6:.1f}M parameters, {config.train.batch_size} x "
            f"{config.data.seq_length} tokens in micro-batches of {config.train.micro_bs}, {config.train.dtype}, "
            f"{torch.cuda.get_device_name() if self._device.type == 'cuda' else 'CPU'}, torch {torch.__version__}, "
            f"{options.turns} turns of {options.steps} step(s)\n\n"
            "| loop | tokens/s, median | best | MFU, median | peak memory | loss after | ratio of medians | bests |\n"
            "|---|---|---|---|---|---|---|---|",
            flush=True,
        )

    def add(self, ended: Sequence[Measured]) -> None:
        """Print rows; ratios are to the faster of the loops by hand, else to the first loop that ran."""
        self._rows |= {loop.name: loop for loop in ended}
        ran = [loop for loop in self._rows.values() if not loop.failed]
        self._by_hand = [loop for loop in ran if loop.name not in VARIANTS] or ran[:1]
        for loop in ended:
            print(
                f"| {loop.name} | failed: {loop.failed} | | | | | | |" if loop.failed else self._row(loop), flush=True
            )

    def _row(self, loop: Measured) -> str:
        last, mfu = loop.turns[-1], self._mfu(loop)
        return (
            f"| {loop.name} | {self._tokens / loop.median_s:,.0f} | {self._tokens / loop.best_s:,.0f} | "
            f"{'' if mfu is None else f'{100 * mfu:.1f} %'} | {last.peak_bytes / 1e9:.2f} GB | "
            f"{finite(last.loss, f'the loss of {loop.name}'):.5f} | {self._ratio(loop):.3f} | "
            f"{min(other.best_s for other in self._by_hand) / loop.best_s:.3f} |"
        )

    def _ratio(self, loop: Measured) -> float:
        return min(other.median_s for other in self._by_hand) / loop.median_s

    def _mfu(self, loop: Measured) -> float | None:
        flops = flops_per_token(shape_of(self._config), self._vocab_size, self._config.data.seq_length)
        peak = peak_flops(self._device)
        return None if peak is None else self._tokens * flops / loop.median_s / peak

    def close(self) -> int:
        """Print what is held against the aims; returns how many of them are missed, and loops that died."""
        print("\nRatios are to the faster of the loops by hand.")
        missed = sum(bool(loop.failed) for loop in self._rows.values())
        ours, options = self._rows.get(OURS), self._options
        if ours is not None and not ours.failed:
            missed += self._is_missed("tokens/s beside the faster loop by hand", self._ratio(ours), options.least_ratio)
            missed += self._is_missed("MFU", self._mfu(ours), options.least_mfu)
        plain = self._rows.get("no compile")
        if self._device.type == "cuda" and plain is not None and not plain.failed:
            gpu_bytes = torch.cuda.get_device_properties(self._device).total_memory
            run = GpuRun(Needs(self._config, self._vocab_size), 1, gpu_bytes)
            tensors, measured = sum(predict_gpu(run).tensors.values()), plain.turns[-1].peak_bytes
            print(
                f"Predicted memory, uncompiled: {tensors / 1e9:.2f} GB, {tensors / measured:.3f} of what was measured."
            )
            if options.memory_within is not None:
                missed += self._is_missed(
                    "1 - error of the memory", 1 - abs(tensors / measured - 1), 1 - options.memory_within
                )
        return missed

    @staticmethod
    def _is_missed(what: str, found: float | None, least: float | None) -> bool:
        if least is None:
            return False
        is_punched = found is not None and found >= least
        value = "unknown" if found is None else f"{found:.3f}"
        print(f"Aim, {what}: at least {least:g}; {'met' if is_punched else 'MISSED'}: {value}.")
        return not is_punched


def main() -> None:
    options, arguments = parse_args()
    if options.work:
        work(options.work, arguments)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    table = Table(config_of(arguments, {}, tempfile.gettempdir()), options)
    for ended in measure(options, arguments):
        table.add(ended)
    sys.exit(1 if table.close() else 0)


if __name__ == "__main__":
    main()
