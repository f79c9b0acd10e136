"""One peer whose loop is its own: `dropin_peer --store URL --data SEED`; says on its last line how it ended, as JSON.

`--data`: of its batches, which depend on nothing else. `--hold FILE`: make the last inner step when this file is there.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

import zeroband

INNER_STEPS = 2


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", required=True)
    parser.add_argument("--data", type=int, required=True)
    parser.add_argument("--total-steps", type=int, required=True)
    parser.add_argument("--hold", type=Path)
    asked = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, batches = (
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        torch.Generator().manual_seed(asked.data),
    )
    with zeroband.DiLoCoOptimizer(
        params=model.named_parameters(),
        batch_size=8,
        inner_steps=INNER_STEPS,
        inner_optimizer=partial(torch.optim.AdamW, lr=0.01),
        store=asked.store,
        total_steps=asked.total_steps,
    ) as optimizer:
        while not optimizer.is_done:
            model(torch.randn(8, 5, generator=batches)).square().mean().backward()
            while optimizer.inner_step == asked.total_steps - 1 and asked.hold is not None and not asked.hold.exists():
                time.sleep(0.05)
            optimizer.step()
            optimizer.zero_grad()
        print(json.dumps({"is_done": optimizer.is_done, "inner_step": optimizer.inner_step}), flush=True)


if __name__ == "__main__":
    main()
