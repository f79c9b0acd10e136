"""`zeroband sample CKPT --prompt TEXT`: generate text with a trained model.

CKPT is the folder or URL of one checkpoint, the root of a run's checkpoints (its latest one), or an exported directory.
The prompt starts a document, as in training; sampling ends with the document. Exit codes: 0 done, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from zeroband.tools.arguments import bounded, run_command
from zeroband.tools.offline.opened import device_of, open_asked, parser_for_checkpoint

if TYPE_CHECKING:
    import torch

    from zeroband.export.directory import TrainedModel


def main(argv: Sequence[str]) -> int:
    """Generate and print. Returns the exit code."""
    parser = parser_for_checkpoint("sample", __doc__)
    parser.add_argument("--prompt", default="", help="text to continue (default: empty)")
    add = parser.add_argument
    add("--tokens", type=bounded(int, ge=1), default=256, help="maximum tokens to generate (default: 256)")
    add("--temperature", type=bounded(float, ge=0), default=0.8, help="0: greedy decoding (default: 0.8)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    options = parser.parse_args(argv)
    return run_command("sample", lambda: _sample(options))


def _sample(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    model = open_asked(options, "sample").model
    asked = {name: getattr(options, name) for name in ("tokens", "temperature", "seed")}
    print(f"{options.prompt}{continuation(model, options.prompt, device, **asked)}")
    return 0


def continuation(
    model: TrainedModel, prompt: str, device: torch.device, *, tokens: int, temperature: float, seed: int
) -> str:
    """Return the continuation of a prompt up to the end of the document; in a chat, the assistant's answer."""
    import torch  # imported lazily: slow

    from zeroband.data.chat import prompt_of
    from zeroband.model import generate

    ids, end = prompt_of(model.tokenizer, prompt)
    begun = ids.tolist() if model.tokenizer.chat_template else [end, *ids.tolist()]
    generated = generate(
        model.build(device),
        torch.tensor(begun, device=device),
        max_new_tokens=tokens,
        temperature=temperature,
        seed=seed,
        context=model.seq_length,
    ).tolist()[len(begun) :]
    return model.tokenizer.decode(generated[: generated.index(end)] if end in generated else generated)
