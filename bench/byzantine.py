"""What members that lie cost: the loss after 40 rounds of 8 members of which 1, 2 or 3 lie, over the honest ones alone.

python bench/byzantine.py [--rules off clip trimmed] [--lies flip scale] [--liars 1 2 3] [--seeds 0 1]
python bench/byzantine.py --nodes [--rules off clip] [--lies flip vote] [--liars 1]     # 8 real nodes for each figure

Without --nodes all members are in this process: a small model of bytes learns made-up text, of which a quarter is in a
language of each member. Contributions are encoded, combined and decoded by the code that nodes use, and plans and
verdicts are their records, so that weights and trust are those of a run. With --nodes, 8 nodes train as
`zeroband simulate` has them (bench/lying_nodes.py), which can also lie about what only a hostile process can, and it is
said who was named after how many rounds.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from evidence import finite, require_known
from lying_nodes import HOSTILE, INNER_STEPS, train
from torch import Tensor

from zeroband.config.data import SyntheticSource
from zeroband.config.outer import OuterSGDConfig
from zeroband.data.sources import documents
from zeroband.elastic.membership.records import RoundPlan
from zeroband.elastic.membership.trust import RECORD, scores_after, trust_of
from zeroband.kernels.codec import CODECS
from zeroband.kernels.robust import RobustRule, combine
from zeroband.outer.outer_optimizer import OuterSGD

MEMBERS, ROUNDS = 8, 40
RULES: dict[str, RobustRule | None] = {
    "off": None,
    "clip": RobustRule("clip"),
    "trimmed": RobustRule("trimmed", trim=0.25),
    "trimmed 0.4": RobustRule("trimmed", trim=0.4),
    "centered_clip": RobustRule("centered_clip", iterations=1),
}
CODEC = CODECS["int8"]
OUTER = OuterSGDConfig(lr=0.7, momentum=0.6)

LIES = ("noise", "flip", "flip x100", "scale", "nan", "copy", "weight")
CONTEXT, WIDTH, HIDDEN, BATCH, LR, BYTES = 6, 8, 48, 32, 5e-3, 128


def lie(kind: str, own: Tensor, another: Tensor, random: torch.Generator) -> Tensor:
    """What a liar sends in place of what it learned. The noise is as long as that, a hundred times."""
    noise = torch.randn(own.numel(), generator=random)
    lies: Mapping[str, Callable[[], Tensor]] = {
        "noise": lambda: noise * (100 * own.norm() / noise.norm()),
        "flip": lambda: -own,
        "flip x100": lambda: -100 * own,
        "scale": lambda: 100 * own,
        "copy": lambda: another,
    }
    return lies[kind]() if kind in lies else own


class Learners:
    """As many models of the next byte as there are members, one batched product for all; AdamW for each.

    Parameters: (members, n) float32. Embeddings of CONTEXT bytes, one hidden layer, logits.
    """

    def __init__(self, members: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        shapes = [(BYTES, WIDTH), (CONTEXT * WIDTH, HIDDEN), (HIDDEN, BYTES)]
        initial = [torch.randn(shape, generator=random) / shape[0] ** 0.5 for shape in shapes]
        initial[0] *= BYTES**0.5 / 4
        self._shapes = shapes
        self.start = torch.cat([part.flatten() for part in initial])
        self.params = self.start.expand(members, -1).clone().requires_grad_()
        self._optimizer = torch.optim.AdamW([self.params], lr=LR, weight_decay=0.01)

    def losses(self, params: Tensor, windows: Tensor) -> Tensor:
        """Mean loss of each member, in nats per byte. Shapes: params (m, n), windows (m, b, CONTEXT + 1) int64."""
        embedding, inner, outer = (
            part.view(len(params), *shape)
            for part, shape in zip(params.split([a * b for a, b in self._shapes], dim=1), self._shapes, strict=True)
        )
        places = windows[..., :-1].flatten(1)[..., None].expand(-1, -1, WIDTH)  # (m, b * CONTEXT, WIDTH)
        found = embedding.gather(1, places).view(*windows.shape[:2], CONTEXT * WIDTH)
        logits = torch.bmm(torch.relu(torch.bmm(found, inner)), outer)  # (m, b, BYTES)
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), windows[..., -1], reduction="none")
        return losses.mean(dim=1)

    def train(self, batches: Sequence[Tensor]) -> None:
        for windows in batches:
            self._optimizer.zero_grad()
            self.losses(self.params, windows).sum().backward()
            self._optimizer.step()

    def restart(self, params: Tensor) -> None:
        with torch.no_grad():
            self.params.copy_(params.expand_as(self.params))


@cache
def corpus() -> tuple[list[Tensor], Tensor]:
    """The text of each member, and what all are held to.

    Three quarters of a member's documents are in a made-up language that all share, the rest in another for each.
    """

    def text(seed: int, first: int, count: int) -> Tensor:
        source = SyntheticSource(type="synthetic", documents=first + count)
        found = " ".join(str(document.text) for document in islice(documents(source, seed), first, None))
        return torch.tensor(list(found.encode()))

    own = [torch.cat([text(0, 300 * place, 300), text(1 + place, 0, 100)]) for place in range(MEMBERS)]
    return own, text(0, 300 * MEMBERS, 100)


def windows_of(text: Tensor, count: int, random: torch.Generator) -> Tensor:
    """(count, CONTEXT + 1) int64 from anywhere in a text."""
    starts = torch.randint(len(text) - CONTEXT, (count,), generator=random)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def final_loss(rule: RobustRule | None, kind: str, honest: int, liars: int, seed: int) -> float:
    """Nats per byte of held out text at the end; not a number where the run stands still. The last members lie."""
    texts, held_out = corpus()
    count, random = honest + liars, torch.Generator().manual_seed(seed)
    names = tuple(f"m{place}" for place in range(count))
    learners = Learners(count, seed)
    outer, momentum = learners.start.clone(), torch.zeros_like(learners.start)
    optimizer, record = OuterSGD(OUTER), dict[str, Any]()
    for number in range(ROUNDS):
        batches = [
            torch.stack([windows_of(texts[place], BATCH, random) for place in range(count)]) for _ in range(INNER_STEPS)
        ]
        learners.train(batches)
        deltas = [outer - params for params in learners.params.detach()]
        sent = [delta if place < honest else lie(kind, delta, deltas[0], random) for place, delta in enumerate(deltas)]
        parts = [CODEC.encode(delta) for delta in sent]
        weights = [INNER_STEPS * BATCH] * count
        for place in range(honest, count):
            if kind == "nan":
                parts[place][:4] = torch.tensor([math.nan]).view(torch.uint8)
            weights[place] *= 1000 if kind == "weight" else 1
        trust = () if rule is None else trust_of(names, record)
        plan = RoundPlan(1, 1, number, names, tuple(weights), trust=trust)
        if rule is None:
            each = zip(parts, plan.shares, strict=True)
            combined = sum((share * CODEC.decode(part, len(outer)) for part, share in each), torch.zeros_like(outer))
        else:
            combined, measured = combine(rule, CODEC, parts, plan.shares, len(outer))
            seen = {m: c for m, c in zip(names, measured.cosines(), strict=True) if c is not None}
            record = {RECORD: scores_after(record, plan, seen)}
        if not combined.isfinite().all():
            return math.nan  # no owner encodes it
        optimizer.apply(outer, momentum, CODEC.decode(CODEC.encode(combined), len(outer)), outer_step=number + 1)
        learners.restart(outer)
    asked = windows_of(held_out, 20_000, torch.Generator().manual_seed(0))
    with torch.no_grad():
        return float(learners.losses(outer[None], asked[None])[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=list(RULES))
    parser.add_argument("--lies", nargs="+", help="default: all; with --nodes also those of hostile processes")
    parser.add_argument("--liars", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--nodes", action="store_true", help="8 real nodes for each figure: minutes each")
    parser.add_argument("--timeout-s", type=float, default=900.0, help="of one run of real nodes")
    options = parser.parse_args()
    require_known(parser, options.rules, RULES)
    known = (*LIES, *HOSTILE) if options.nodes else LIES
    options.lies = options.lies or known
    require_known(parser, options.lies, known)
    torch.set_num_threads(1)

    cache = tempfile.TemporaryDirectory()

    def measured(rule: str, kind: str, honest: int, liars: int) -> tuple[float, str]:
        """The loss, and with real nodes what else is said of the run."""
        if not options.nodes:
            return statistics.mean(final_loss(RULES[rule], kind, honest, liars, seed) for seed in options.seeds), ""
        ended = [
            train(
                *(RULES[rule], kind, honest, liars, seed),
                rounds=ROUNDS,
                cache=Path(cache.name),
                timeout_s=options.timeout_s,
            )
            for seed in options.seeds
        ]
        return statistics.mean(one.loss for one in ended), "".join(f" ({one})" for one in ended)

    alone = {
        liars: finite(measured("off", "none", MEMBERS - liars, 0)[0], "the loss of the honest alone")
        for liars in sorted({0, *options.liars})
    }
    print("honest alone:", ", ".join(f"{MEMBERS - liars}: {value:.4f}" for liars, value in alone.items()))
    print(f"| lie | liars | {' | '.join(options.rules)} |\n|---|---|{'---|' * len(options.rules)}", flush=True)
    cells = [("none", 0), *((kind, liars) for kind in options.lies for liars in options.liars)]
    for kind, liars in cells:
        said: list[str] = []
        for rule in options.rules:
            value, more = measured(rule, kind, MEMBERS - liars, liars)
            off = 100 * (value / alone[liars] - 1)
            said.append(("stands still" if math.isnan(value) else f"{off:+.1f} %" if off < 1000 else "diverges") + more)
        print(f"| {kind} | {liars} | {' | '.join(said)} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
