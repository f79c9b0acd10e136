"""The [eval] section: what a node evaluates while it trains, and how often."""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import PositiveInt, field_validator

from zeroband.config.data import DataConfig, DocumentSource, JsonlSource, ParquetSource, TextSource, TokensSource
from zeroband.config.section import NAME_PATTERN, OwnSection

_T = TypeVar("_T", TextSource, JsonlSource, ParquetSource)

_COMPRESSION = (".gz", ".zst")
_MANIFEST = "manifest.json"
"""What zeroband.data.shard_set calls the file by which a prepared set is known."""


class EvalConfig(OwnSection):
    """Evaluation of the outer parameters while this node trains; the others wait for it where they meet."""

    every_steps: PositiveInt = 500
    """Inner steps of the run from one evaluation to the next. It takes place at the end of the first round that reaches
    a multiple of them, and at the end of the run."""
    batches: PositiveInt | None = None
    """Batches of train.batch_size sequences that are evaluated of the held-out samples, and of each of eval.sources:
    always the same ones, so that losses compare. None: 8, or all where there are fewer."""
    sources: tuple[str, ...] = ()
    """Further text to evaluate on, each as NAME=PATH: a file, glob or fsspec URL of JSON Lines (`.jsonl`), Parquet
    (`.parquet`), a folder of prepared ids (ends with `/` or `/manifest.json`) or else plain text. The
    samples that data.hold_out keeps back are evaluated anyway."""

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
        """How each of the sources is read, by its name: as the data of the run, whose keys of such files count."""
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
    """The first source of this kind that is trained on."""
    return next((part.source for part in data.parts.values() if isinstance(part.source, kind)), None)
