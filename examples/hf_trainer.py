"""A small Llama in transformers' `Trainer`, trained by peers that come and go.

Needs `pip install transformers accelerate`. In two terminals, the second one a while later:

    python examples/hf_trainer.py
    ZERO_BAND_STORE__URL=unix:///tmp/zeroband-redis-XXXX/redis.sock python examples/hf_trainer.py    # as it says

What `# zeroband` marks makes it a peer; the rest is the program as it was. The text is Python's argparse.
"""

from __future__ import annotations

import argparse
import os  # zeroband
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

import zeroband  # zeroband

try:
    import transformers
except ImportError:
    raise SystemExit("this example needs transformers: pip install transformers accelerate") from None


class StopWithRun(transformers.TrainerCallback):  # zeroband
    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        control.should_training_stop |= optimizer.optimizer.is_done  # within accelerate's


def warm_up(step: int) -> float:
    """Share of the learning rate at an inner step."""
    return min(1.0, (step + 1) / 20)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama with the Trainer, together with other peers.")
    parser.add_argument("--steps", type=int, default=2000, help="inner steps of the run")
    parser.add_argument("--inner-steps", type=int, default=50, help="between two outer steps")
    asked = parser.parse_args()

    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        output_dir="runs/hf_trainer",
        max_steps=asked.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        data_seed=os.getpid(),  # zeroband
    )
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    model = transformers.LlamaForCausalLM(config).to(arguments.device)
    samples = torch.tensor(list(Path(argparse.__file__).read_bytes())).unfold(0, 64, 16)  # (n, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    optimizer = zeroband.DiLoCoOptimizer(  # zeroband
        inner_optimizer=optimizer,
        batch_size=2 * 4 * arguments.world_size,
        inner_steps=asked.inner_steps,
        total_steps=asked.steps,
    )
    # zeroband, before: schedule = LambdaLR(optimizer, warm_up)
    schedule = LambdaLR(optimizer, lambda _: warm_up(optimizer.inner_step))
    trainer = transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": sample, "labels": sample} for sample in samples],
        optimizers=(optimizer, schedule),
        callbacks=[StopWithRun()],  # zeroband
    )
    trainer.train()
    optimizer.close()  # zeroband


if __name__ == "__main__":
    main()
