"""One peer that is an example: `example_peer EXAMPLE TELL --store URL ...`; the rest are the example's own arguments.

Writes to TELL, as JSON, the losses that it went back through. `--until FILE`: with few steps made it waits for this
file. `--then FILE`: goes on slowly until this one is there. `--plain FILE`: afterwards this loop, without zeroband.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zeroband import DiLoCoOptimizer

WAIT_AT = 6
"""Inner step in which it waits."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("example", type=Path)
    parser.add_argument("tell", type=Path)
    parser.add_argument("--store", required=True)
    parser.add_argument("--until", type=Path)
    parser.add_argument("--then", type=Path)
    parser.add_argument("--plain", type=Path)
    asked, others = parser.parse_known_args()
    os.environ["ZERO_BAND_STORE__URL"] = asked.store
    os.chdir(asked.tell.parent)
    torch.set_num_threads(1)
    losses = _watch_losses()

    def before_step(optimizer: object, *_: Any) -> None:
        if asked.until is None or not isinstance(optimizer, DiLoCoOptimizer) or optimizer.inner_step < WAIT_AT:
            return
        while not asked.until.exists():
            time.sleep(0.05)
        if not asked.then.exists():
            time.sleep(0.25)

    register_optimizer_step_pre_hook(before_step)
    sys.argv = [str(asked.example), *others]
    runpy.run_path(str(asked.example), run_name="__main__")
    told = {"losses": list(losses)}
    if asked.plain is not None:
        losses.clear()
        sys.modules["zeroband"] = None  # type: ignore[assignment]
        runpy.run_path(str(asked.plain), run_name="__main__")
        told["plain"] = losses
    asked.tell.write_text(json.dumps(told))


def _watch_losses() -> list[float]:
    """Every loss from now on that something goes back through."""
    losses: list[float] = []
    backward = torch.Tensor.backward

    def watched(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss.item())
        backward(loss, *args, **kwargs)

    torch.Tensor.backward = watched
    return losses


if __name__ == "__main__":
    main()
