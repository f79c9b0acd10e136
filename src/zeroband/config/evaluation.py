"""The [eval] section: evaluation during training."""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import PositiveInt, field_validator

from zeroband.config.data import DataConfig, DocumentSource, JsonlSource, ParquetSource, TextSource, TokensSource
from zeroband.config.section import NAME_PATTERN, OwnSection

_T = TypeVar("_T", TextSource, JsonlSource, ParquetSource)

_COMPRESSION = (".gz", ".zst")
_MANIFEST = "manifest.json"
"""File that marks a prepared set; the name of zeroband.data.shard_set."""


class EvalConfig(OwnSection):
    """Evaluation of the outer parameters on this node during training; others may wait for it at the next round."""

    every_steps: PositiveInt = 500
    """Inner steps between evaluations. They take place after the first round that reaches a multiple, and at the end of
    the run."""
    batches: PositiveInt | None = None
    """Batches of train.batch_size sequences to evaluate, of the held-out samples and of each of eval.sources; always
    the same ones, so that losses are comparable. None: 8, or all if there are fewer."""
    sources: tuple[str, ...] = ()
    """Additional evaluation text as NAME=PATH: a file, glob or fsspec URL of JSON Lines (`.jsonl`), Parquet
    (`.parquet`), a folder of prepared ids (ends with `/` or `/manifest.json`), or plain text. The samples of
    data.hold_out are always evaluated."""

    @field_validator("sources")
    @classmethod
    def _have_names(cls, sources: tuple[str, ...]) -> tuple[str, ...]:
        seen = set[str]()
        for source in sources:
            name, equals, path = source.partition("=")
            if not equals or not path or not re.match(NAME_PATTERN, name):
                raise ValueError(
                    f"eval.sources: {source!r} is no NAME=PATH, such as wiki=/data/wiki.jsonl; a name is 1 to 64 "
                    "letters, digits, dots, dashes and underscores"
                )
            if name in seen:
                raise ValueError(f"eval.sources names {name!r} twice; give each source another name")
            seen.add(name)
        return sources

    def data_of(self, data: DataConfig) -> dict[str, DataConfig]:
        """Return the [data] section of each source by name; keys for such files are those of the training data."""
        named = dict(source.split("=", 1) for source in self.sources)
        alone = data.model_copy(update={"sources": (), "phases": ()})
        return {name: alone.model_copy(update={"source": _source_of(path, data)}) for name, path in named.items()}


def _source_of(path: str, data: DataConfig) -> DocumentSource | TokensSource:
    folder = path.removesuffix(_MANIFEST)
    if folder.endswith("/"):
        return TokensSource(type="tokens", path=folder)
    bare = path
    for ending in _COMPRESSION:
        bare = bare.removesuffix(ending)
    if bare.endswith((".jsonl", ".ndjson")):
        settings = _like(data, JsonlSource) or JsonlSource(type="jsonl", paths=(path,))
    elif bare.endswith(".parquet"):
        settings = _like(data, ParquetSource) or ParquetSource(type="parquet", paths=(path,))
    else:
        settings = _like(data, TextSource) or TextSource()
    return settings.model_copy(update={"paths": (path,)})


def _like(data: DataConfig, kind: type[_T]) -> _T | None:
    """Return the first training source of a kind."""
    return next((part.source for part in data.parts.values() if isinstance(part.source, kind)), None)
