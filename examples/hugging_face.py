"""A small Llama of Hugging Face's transformers in a loop of one's own, trained by peers that come and go.

Needs the extra `hf` (`pip install 'zeroband-elastic[hf]'`, or in a clone `uv sync --extra hf`). In two terminals, the
second one a while later:

    python examples/hugging_face.py
    python examples/hugging_face.py --store unix:///tmp/zeroband-redis-XXXX/redis.sock    # as the first one says

On several machines they share a Redis: `--store redis://HOST:6379` on each. The model has random weights and the text
is Python's standard library, as bytes, so nothing is downloaded. For a model of the hub: `from_pretrained` in the place
of `LlamaForCausalLM(config)`, on every peer.
"""

from __future__ import annotations

import argparse
import os
import signal
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import zeroband
from zeroband.errors import way_to_extra

try:
    from transformers import LlamaConfig, LlamaForCausalLM, get_constant_schedule_with_warmup
except ImportError:
    raise SystemExit(f"this example needs transformers: {way_to_extra('hf')}") from None


def standard_library() -> Tensor:
    """(n,) uint8: the sources beside the `os` module."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def next_batch(text: Tensor, generator: torch.Generator, samples: int, length: int = 128) -> Tensor:
    """(samples, length) int64 from random places."""
    starts = torch.randint(len(text) - length, (samples,), generator=generator)
    return torch.stack([text[start : start + length] for start in starts.tolist()]).long()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small Llama together with other peers.")
    parser.add_argument("--store", help="address of the run's Redis; without it this peer starts one for this machine")
    parser.add_argument("--total-steps", type=int, default=2000, help="inner steps of the run")
    parser.add_argument("--inner-steps", type=int, default=50, help="between two outer steps")
    parser.add_argument("--batch-size", type=int, default=8, help="samples of this peer in a step")
    asked = parser.parse_args()

    torch.manual_seed(0)  # peers that begin the run together hold one model; later ones fetch it
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
    )
    model = LlamaForCausalLM(config)
    text, generator = standard_library(), torch.Generator().manual_seed(os.getpid())  # each peer reads elsewhere

    with zeroband.DiLoCoOptimizer(
        params=model.named_parameters(),
        batch_size=asked.batch_size,
        inner_steps=asked.inner_steps,
        store=asked.store,
        inner_optimizer=partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        lr_scheduler=partial(get_constant_schedule_with_warmup, num_warmup_steps=100),
        total_steps=asked.total_steps,
    ) as optimizer:
        signal.signal(signal.SIGTERM, lambda *_: optimizer.leave())
        print(f"in the run at step {optimizer.inner_step}; others join with --store {optimizer.store_url}", flush=True)
        while not optimizer.is_done:
            batch = next_batch(text, generator, asked.batch_size)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            round = optimizer.last_round  # None until a node that joined has contributed
            if round is not None and optimizer.inner_step % asked.inner_steps == 0:
                peers, digest = len(round.members), round.state_digest
                print(f"step {optimizer.inner_step}  loss {loss.item():.3f}  peers {peers}  {digest}", flush=True)


if __name__ == "__main__":
    main()
