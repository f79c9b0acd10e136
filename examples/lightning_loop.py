"""A module in Lightning's `Trainer`, trained by peers that come and go.

Needs `pip install lightning`. In two terminals, the second one a while later:

    python examples/lightning_loop.py
    ZERO_BAND_STORE__URL=unix:///tmp/zeroband-redis-XXXX/redis.sock python examples/lightning_loop.py    # as it says

What `# zeroband` marks makes it a peer; the rest is the program as it was. The text is Python's argparse.
"""

from __future__ import annotations

import argparse
import os  # zeroband
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import zeroband  # zeroband

try:
    import lightning
except ImportError:
    raise SystemExit("this example needs lightning: pip install lightning") from None

BATCH = 8


def warm_up(step: int) -> float:
    """Share of the learning rate at an inner step."""
    return min(1.0, (step + 1) / 20)


class ByteModel(lightning.LightningModule):
    """Predicts the next byte."""

    def __init__(self, asked: argparse.Namespace, width: int = 64) -> None:
        super().__init__()
        self.asked = asked
        self.embedding = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def training_step(self, batch: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(batch[:, :-1]))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        optimizer = zeroband.DiLoCoOptimizer(  # zeroband
            inner_optimizer=optimizer,
            batch_size=BATCH,
            inner_steps=self.asked.inner_steps,
            total_steps=self.asked.steps,
        )
        # zeroband, before: schedule = LambdaLR(optimizer, warm_up)
        schedule = LambdaLR(optimizer, lambda _: warm_up(optimizer.inner_step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StopWithRun(lightning.Callback):  # zeroband
    def on_fit_start(self, trainer, module):
        trainer.should_stop |= trainer.optimizers[0].is_done

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop |= trainer.optimizers[0].is_done

    def on_fit_end(self, trainer, module):
        trainer.optimizers[0].close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a byte-level model with Lightning, together with other peers.")
    parser.add_argument("--steps", type=int, default=2000, help="inner steps of the run")
    parser.add_argument("--inner-steps", type=int, default=50, help="between two outer steps")
    asked = parser.parse_args()

    torch.manual_seed(0)
    model = ByteModel(asked)
    samples = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, 65, 16)  # (n, 65)
    torch.manual_seed(os.getpid())  # zeroband
    loader = DataLoader(samples, BATCH, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=asked.steps,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        callbacks=[StopWithRun()],  # zeroband
    )
    trainer.fit(model, loader)


if __name__ == "__main__":
    main()
