"""One peer with checkpoints: `dropin_sequel --store URL --type TYPE`; AdamW as outer optimizer where TYPE is diloco.

Says on its first line where it begins, as JSON, and trains until it is ended.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import zeroband


class Sampler:
    """Counts the batches that it gave."""

    def __init__(self) -> None:
        self.given = 0

    def next(self) -> torch.Tensor:
        self.given += 1
        return torch.randn(8, 5, generator=torch.Generator().manual_seed(self.given))

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.given = state_dict["given"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--type", default="diloco")
    parser.add_argument("--saved", type=Path, required=True)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, sampler = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)), Sampler()
    is_diloco = asked.type == "diloco"
    with zeroband.DiLoCoOptimizer(
        params=model.named_parameters(),
        batch_size=8,
        inner_steps=2 if is_diloco else None,
        inner_optimizer=partial(torch.optim.AdamW, lr=0.01),
        outer_optimizer=partial(torch.optim.AdamW, lr=0.01) if is_diloco else None,
        lr_scheduler=partial(torch.optim.lr_scheduler.LinearLR, total_iters=10**6),
        store=asked.store,
        state={"sampler": sampler},
        settings={
            "outer.type": asked.type,
            "ckpt.path": asked.saved,
            "ckpt.every_rounds": 2,
            "resume": True,
        },
    ) as optimizer:
        signal.signal(signal.SIGTERM, lambda *_: optimizer.leave())
        begun = {"inner_step": optimizer.inner_step, "given": sampler.given, "moments": len(optimizer.state)}
        print(json.dumps(begun), flush=True)
        while not optimizer.is_done:
            model(sampler.next()).square().mean().backward()
            time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
