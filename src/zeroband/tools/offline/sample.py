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

    from zeroband.data.chat import Message
    from zeroband.export.directory import TrainedModel


def main(argv: Sequence[str]) -> int:
    """Generate and print. Returns the exit code."""
    parser = parser_for_sampling("sample", __doc__)
    parser.add_argument("--prompt", default="", help="text to continue (default: empty)")
    options = parser.parse_args(argv)
    return run_command("sample", lambda: _sample(options))


def parser_for_sampling(command: str, text: str | None) -> argparse.ArgumentParser:
    """Return the parser of a command that generates text."""
    parser = parser_for_checkpoint(command, text)
    add = parser.add_argument
    add("--tokens", type=bounded(int, ge=1), default=256, help="maximum tokens to generate (default: 256)")
    add("--temperature", type=bounded(float, ge=0), default=0.8, help="0: greedy decoding (default: 0.8)")
    add("--seed", type=int, default=0, help="seed of the sampling (default: 0)")
    return parser


def _sample(options: argparse.Namespace) -> int:
    device = device_of(options.device)
    sampler = Sampler(open_asked(options, "sample").model, device, options)
    print(f"{options.prompt}{sampler.continuation(options.prompt)}")
    return 0


class Sampler:
    """A model, and how it is sampled: `tokens`, `temperature` and `seed` of `parser_for_sampling`."""

    def __init__(self, model: TrainedModel, device: torch.device, options: argparse.Namespace) -> None:
        self._tokenizer = model.tokenizer
        self._context = model.seq_length
        self._device = device
        self._options = options
        self._model = model.build(device)

    @property
    def is_chat(self) -> bool:
        """Whether the model was trained on conversations."""
        return self._tokenizer.chat_template is not None

    def continuation(self, prompt: str, before: Sequence[Message] = ()) -> str:
        """Return the continuation of a prompt up to the end of the document; in a chat, the assistant's answer.

        `before`: earlier messages of the chat.
        """
        import torch  # imported lazily: slow

        from zeroband.data.chat import prompt_of
        from zeroband.model import generate

        ids, end = prompt_of(self._tokenizer, prompt, before)
        begun = ids.tolist() if self.is_chat else [end, *ids.tolist()]
        generated = generate(
            self._model,
            torch.tensor(begun, device=self._device),
            max_new_tokens=self._options.tokens,
            temperature=self._options.temperature,
            seed=self._options.seed,
            context=self._context,
        ).tolist()[len(begun) :]
        return self._tokenizer.decode(generated[: generated.index(end)] if end in generated else generated)
