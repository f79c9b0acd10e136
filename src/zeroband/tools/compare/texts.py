"""Splits a comparison's text by document into training, tuning and reported parts.

Held-out samples of packed text (data.hold_out) come from documents whose other parts are trained on, which favours
memorisation. Here no document is in two parts, and equal documents are in the same part.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from zeroband.config.data import DataConfig, DocumentSource, ParquetSource
from zeroband.data.dataset import open_dataset
from zeroband.data.sources import documents, source_identity
from zeroband.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from zeroband.export.opened import OpenedModel

Half = Literal["tuning", "reported"]

_FORMAT = 2
_HELD_OUT: Mapping[int, Half] = {0: "tuning", 1: "reported"}
_OF = 16
"""One document in this many goes to each held-out half."""
_TRAINED = "trained"
_COLUMN = "text"
_DIGEST = "digest"
"""File with the digest of a source's documents in their order."""
_AT_ONCE = 1024
_BATCH_SIZE = 8


@dataclass(frozen=True)
class Texts:
    """Text split by document."""

    trained: DataConfig
    held_out: Mapping[Half, DataConfig]
    digest: str
    """Digest of the documents and of their mixture, independent of where they lie."""

    def arguments(self, arguments: Sequence[str]) -> tuple[str, ...]:
        """Return the flags of a run with the training part as data source: as the last flag, it replaces the others."""
        name = "sources" if self.trained.sources else "source"
        trained = self.trained.model_dump(mode="json", include={name})
        return (*arguments, f"--data.{name}={json.dumps(trained[name])}")


def cut(data: DataConfig, seed: int, folder: Path) -> Texts | None:
    """Split the text of a [data] section, cached in a folder shared by all comparisons.

    None without documents (prepared or synthetic ids, conversations) or with too few. Raises ConfigError, StorageLost
    as `documents` does.
    """
    parts: dict[str, tuple[DocumentSource, Path]] = {}
    identity: list[Any] = [_FORMAT, _OF, data.model_dump(mode="json", include={"sources", "phases"})]
    for name, part in data.parts.items():
        if not isinstance(part.source, DocumentSource) or data.private:
            return None
        key = _digest([_FORMAT, _OF, source_identity(part.source, seed, data.retry_s)])
        parts[name] = part.source, folder.absolute() / key
    for source, place in parts.values():
        if not place.exists():
            _write(source, seed, data.retry_s, place)
        identity.append((place / _DIGEST).read_text())

    def part_of(part: str) -> DataConfig:
        files = {
            name: ParquetSource(
                type="parquet",
                paths=(str(place / f"{part}.parquet"),),
                column=_COLUMN,
                binary=data.tokenizer == "byte",
            )
            for name, (_, place) in parts.items()
        }
        sources = tuple(one.model_copy(update={"source": files[one.name]}) for one in data.sources)
        return data.model_copy(update={"sources": sources} if sources else {"source": files[""]})

    texts = Texts(part_of(_TRAINED), {half: part_of(half) for half in _HELD_OUT.values()}, _digest(identity))
    return texts if _is_enough(texts) else None


def loss_on(half: Half, opened: OpenedModel, texts: Texts | None, device: torch.device, *, samples: int) -> float:
    """Return the loss of a model on at most this many samples of each source, in nats per token.

    For text that cannot be split: on one half of the run's held-out samples. Raises ConfigError.
    """
    # imported lazily: loads torch
    from zeroband.export.evaluation import HeldOut, losses_of, open_held_out, sum_of

    first = 0
    if texts is None:
        held_out = open_held_out(opened, ())
        samples = min(samples, *(source.index.n_held_out // 2 for source in held_out.dataset.sources))
        first = samples if half == "reported" else 0
    else:
        data = texts.held_out[half]
        held_out = HeldOut(open_dataset(data, 0, evaluation_only=True), data)
    found = losses_of(opened, held_out, device, samples=samples, batch_size=_BATCH_SIZE, first=first)
    return sum_of(found.values()).loss


def _is_enough(texts: Texts) -> bool:
    try:
        for data in (texts.trained, *texts.held_out.values()):
            open_dataset(data, 0, evaluation_only=data is not texts.trained).close()
    except ConfigError:
        return False
    return True


def _write(source: DocumentSource, seed: int, retry_s: float, place: Path) -> None:
    """Write the parts as a folder of files, atomically."""
    draft = place.with_name(f"{place.name}.{os.getpid()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    arrow: Any = importlib.import_module("pyarrow")  # has no types
    parquet: Any = importlib.import_module("pyarrow.parquet")
    schema = arrow.schema([(_COLUMN, arrow.binary())])
    writers = {
        part: parquet.ParquetWriter(draft / f"{part}.parquet", schema, compression="zstd")
        for part in (_TRAINED, *_HELD_OUT.values())
    }
    waiting: dict[str, list[bytes]] = {part: [] for part in writers}

    def flush(part: str) -> None:
        writers[part].write_table(arrow.table({_COLUMN: waiting[part]}, schema=schema))
        waiting[part].clear()

    seen = hashlib.blake2b(digest_size=16)
    for part, content in _parted(source, seed, retry_s):
        seen.update(hashlib.blake2b(content).digest())
        waiting[part].append(content)
        if len(waiting[part]) == _AT_ONCE:
            flush(part)
    for part, writer in writers.items():
        flush(part)
        writer.close()
    (draft / _DIGEST).write_text(seen.hexdigest())
    if not place.exists():
        draft.rename(place)


def _parted(source: DocumentSource, seed: int, retry_s: float) -> Iterator[tuple[str, bytes]]:
    for document in documents(source, seed, retry_s):
        content = document.text if isinstance(document.text, bytes) else document.text.encode()
        number = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") % _OF
        yield _HELD_OUT.get(number, _TRAINED), content


def _digest(content: Any) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()
