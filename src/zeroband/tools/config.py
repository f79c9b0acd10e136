"""`zeroband config @file.toml --flags ...`: print the configuration that `train` would use, as TOML.

Cautions about its algorithm come first, as comments. Exit codes: 0, 2 for an invalid configuration.
"""

from __future__ import annotations

from collections.abc import Sequence

from zeroband.config import RunConfig, load_config
from zeroband.config.model import parameter_count
from zeroband.config.render import render_toml
from zeroband.config.stability import Caution, cautions_of
from zeroband.data.tokenizer import tokenizer_of
from zeroband.tools.arguments import run_command


def main(argv: Sequence[str]) -> int:
    """Print the configuration or its errors. Returns the exit code."""
    return run_command("config", lambda: _show(argv))


def _show(argv: Sequence[str]) -> int:
    config = load_config(argv)
    for caution in _cautions(config):
        print(f"# caution: {caution}")
    print(render_toml(config), end="")
    return 0


def _cautions(config: RunConfig) -> tuple[Caution, ...]:
    """Return the cautions about the algorithm; the vocabulary counts only if no tokenizer has to be loaded."""
    data = config.data
    vocab_size = data.vocab_size or (tokenizer_of(data).padded_vocab_size if data.tokenizer == "byte" else 0)
    return cautions_of(config, params=parameter_count(config.model, vocab_size))
