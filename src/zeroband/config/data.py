"""The [data] section: the training data, one tagged variant per kind of source."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from zeroband.config.section import NAME_PATTERN, NODE_LOCAL, Section

LONGEST_TURN = (1 << 31) - 1
"""Samples within which each source of a mixture occurs at least once: the product of two such numbers fits in 64 bits.
"""


class TextSource(Section):
    """Plain text files."""

    type: Literal["text"] = "text"
    paths: tuple[str, ...] = Field(default=(), json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs; each file is a document. Empty: this machine's Python standard library."""
    binary: bool = False
    """Accept bytes that are not valid UTF-8, for byte models; needs data.tokenizer = "byte". False: refuse them."""


class JsonlSource(Section):
    """JSON Lines files."""

    type: Literal["jsonl"]
    paths: tuple[str, ...] = Field(min_length=1, json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs of JSON Lines, also `.gz`, `.bz2`, `.xz`, `.zst`; each line is a document."""
    field: str = "text"
    """Key of the text."""


class ParquetSource(Section):
    """Parquet files."""

    type: Literal["parquet"]
    paths: tuple[str, ...] = Field(min_length=1, json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs of Parquet; each row is a document."""
    column: str = "text"
    """Column of the text."""
    binary: bool = False
    """Accept bytes that are not valid UTF-8, for byte models; needs data.tokenizer = "byte". False: refuse them."""


class HuggingFaceSource(Section):
    """A dataset on the Hugging Face Hub, or a local folder of one."""

    type: Literal["huggingface"]
    name: str
    """Name or local path for `datasets.load_dataset`; needs the extra `hf`."""
    subset: str | None = None
    """Configuration name of the dataset."""
    split: str = "train"
    """Split of the dataset."""
    column: str = "text"
    """Column of the text."""
    binary: bool = False
    """Accept bytes that are not valid UTF-8, for byte models; needs data.tokenizer = "byte". False: refuse them."""


class ChatSource(Section):
    """JSON Lines files of conversations, for fine-tuning on the assistant's messages."""

    type: Literal["chat"]
    paths: tuple[str, ...] = Field(min_length=1, json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs of JSON Lines, also `.gz`, `.bz2`, `.xz`, `.zst`; each line is a conversation."""
    field: str = "messages"
    """Key of the messages: objects with `role` and `content`, or with `from` and `value`."""
    template: str | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Jinja chat template, or a file with one. None: the tokenizer's own."""


class SyntheticSource(Section):
    """Generated text, for tests and simulations."""

    type: Literal["synthetic"]
    documents: PositiveInt = 1000
    """Number of documents."""
    mean_length: PositiveInt = 512
    """Mean length of a document in bytes."""


class SyntheticTokensSource(Section):
    """Generated token ids for speed measurements: no tokenizer, download, preparation or storage."""

    type: Literal["synthetic-tokens"]
    tokens: PositiveInt = 1_000_000_000
    """Number of ids below data.vocab_size, including ends of documents."""
    mean_document_length: PositiveInt = 500
    """Mean length of a document in tokens; short ones are frequent, long ones rare."""


class TokensSource(Section):
    """Token ids prepared by `zeroband data prepare` or another trainer's tools, read in place."""

    type: Literal["tokens"]
    path: str = Field(json_schema_extra=NODE_LOCAL)
    """Folder written by `zeroband data prepare`, or files of another format: a path, a glob or an fsspec URL (`s3://`,
    `gs://`, `https://`, `hf://`). Remote ids are fetched in blocks as they are needed."""
    format: Literal["zeroband", "nanogpt", "llm.c", "megatron", "litdata"] = "zeroband"
    """File format. nanogpt: bare ids. llm.c: ids after a header. megatron: `.bin` with `.idx`. litdata: a folder of
    chunks of its TokensLoader."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the ids of nanogpt and litdata, whose files do not tell. None: uint16 if the vocabulary fits."""


BytesSource = TextSource | ParquetSource | HuggingFaceSource
"""Sources whose documents may be arbitrary bytes."""

FilesSource = TextSource | JsonlSource | ParquetSource | ChatSource
"""Sources with file names."""

DocumentSource = TextSource | JsonlSource | ParquetSource | HuggingFaceSource | SyntheticSource
"""Sources of text for a tokenizer."""

Source = Annotated[DocumentSource | ChatSource | TokensSource | SyntheticTokensSource, Field(discriminator="type")]


class MixtureSource(Section):
    """One source of a mixture."""

    name: str = Field(pattern=NAME_PATTERN)
    """Name of the source in metrics and in data.phases."""
    weight: PositiveFloat
    """Share of the samples relative to the other sources' weights; the sum is arbitrary."""
    max_passes: PositiveFloat | None = None
    """Passes over the source after which the others take its share. None: no limit; at least one source needs that."""
    source: Source
    """The source of its documents."""


class Phase(Section):
    """A change of the mixture's weights during a run."""

    from_tokens: PositiveInt
    """Number of dealt tokens of the run from which these weights apply."""
    weights: dict[str, float]
    """Weights of all sources, by name; 0 skips one."""


PRIVATE_KEYS = ("source", "sources", "phases")
"""Keys of [data] that each node sets for itself with data.private."""


class DataConfig(Section):
    """The training data."""

    source: Source = TextSource()
    """Source of the documents."""
    sources: tuple[MixtureSource, ...] = ()
    """Several sources, mixed by weight: `[[data.sources]]` tables in a file, JSON on a command line."""
    phases: tuple[Phase, ...] = ()
    """Changes of the weights of data.sources, in order: `[[data.phases]]` tables."""
    tokenizer: str = Field(default="byte", json_schema_extra=NODE_LOCAL)
    """`byte` (257 ids: the bytes and end of document), or the name or path of a Hugging Face tokenizer (extra `hf`),
    equal on all nodes. If not set, a model with model.name uses its own."""
    vocab_size: int | None = Field(default=None, ge=2)
    """Number of ids of the model, at least those of the tokenizer; determines the model's size, and the range of
    synthetic-tokens. None: the tokenizer's."""
    seq_length: PositiveInt = 1024
    """Tokens per sample."""
    document_mask: bool = True
    """Prevent attention across documents that are packed into one sample."""
    packing: Literal["concatenate", "best-fit"] = "concatenate"
    """How documents fill samples. concatenate: end to end, split at the end of a sample. best-fit: split no document
    that fits into a sample, at the cost of about 1 % padding; ids of `zeroband data prepare` must have been packed the
    same way."""
    skip_bad_rows: bool = False
    """Skip and count unusable rows, lines and files (invalid JSON or UTF-8, a missing field, a conversation that the
    template refuses). False: stop at the first one, and name its place."""
    private: bool = False
    """Each node trains on its own documents, which never leave it: data.source, data.sources and data.phases may
    differ, and each node's samples are counted separately. False: all nodes share one corpus, whose samples the run
    deals out."""
    shuffle_blocks: PositiveInt | None = 2048
    """Blocks of 65,536 prepared tokens to mix at a time: a node fetches only these for its samples. None: mix all at
    once, so that each sample needs another block."""
    cache_dir: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Cache of tokenised documents and fetched ids, kept between runs. None: `zeroband` in the user's cache folder."""
    cache_gb: PositiveFloat = Field(default=20.0, json_schema_extra=NODE_LOCAL)
    """Most gigabytes of fetched ids in the cache; the least recently used are removed."""
    retry_s: PositiveFloat = Field(default=900.0, json_schema_extra=NODE_LOCAL)
    """How long to retry a storage that does not answer, or is overloaded, before this node gives up."""
    hold_out: float = Field(default=0.005, ge=0, lt=0.5)
    """Fraction of the samples to keep back for evaluation."""

    @model_validator(mode="after")
    def _bytes_are_for_byte_models(self) -> DataConfig:
        sources = [part.source for part in self.parts.values()]
        if any(isinstance(one, BytesSource) and one.binary for one in sources) and self.tokenizer != "byte":
            raise ValueError(
                f'data.source.binary=true needs data.tokenizer = "byte", not {self.tokenizer!r}: other tokenizers take '
                "text alone"
            )
        return self

    @model_validator(mode="after")
    def _made_up_ids_are_of_a_vocabulary(self) -> DataConfig:
        made_up = [isinstance(one.source, SyntheticTokensSource) for one in self.sources]
        if any(made_up) and not all(made_up):
            raise ValueError("data.sources: synthetic-tokens stand for no text, so they mix with nothing else")
        if self.is_synthetic and self.vocab_size is None:
            raise ValueError(
                "data.source.type='synthetic-tokens' needs data.vocab_size, the number of ids to draw from, such as "
                "32000: no tokenizer is opened for them"
            )
        if self.is_synthetic and self.packing != "concatenate":
            raise ValueError("data.packing='best-fit' packs documents, and synthetic-tokens are none; drop it")
        return self

    @field_validator("phases")
    @classmethod
    def _follow_each_other(cls, phases: tuple[Phase, ...]) -> tuple[Phase, ...]:
        starts = [phase.from_tokens for phase in phases]
        if any(a >= b for a, b in itertools.pairwise(starts)):
            raise ValueError(f"data.phases must ascend by from_tokens, and do not: {starts}")
        return phases

    @model_validator(mode="after")
    def _mixture_adds_up(self) -> DataConfig:
        if not self.sources:
            if self.phases:
                raise ValueError("data.phases change the weights of data.sources, and there are none")
            return self
        if self.source != TextSource():
            paths = " and data.source.paths = []" if isinstance(self.source, TextSource) else ""
            raise ValueError(
                "data.source and data.sources are both set; drop one of them, a preset's by "
                f'data.source.type = "text"{paths}'
            )
        names = [source.name for source in self.sources]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"data.sources names {twice[0]!r} twice; give each source another name")
        for phase in self.phases:
            if set(phase.weights) != set(names) or any(weight < 0 for weight in phase.weights.values()):
                raise ValueError(
                    f"data.phases, from_tokens={phase.from_tokens}: weights must name all of {', '.join(names)} with "
                    f"numbers from 0 up, not {phase.weights}"
                )
        endless = {source.name for source in self.sources if source.max_passes is None}
        for weights in (phase.weights for phase in self.phases):
            if not any(weights[name] > 0 for name in endless):
                raise ValueError(f"data.phases: all sources with a weight in {weights} have max_passes, data may end")
        if not endless:
            raise ValueError("data.sources all have max_passes, so data may end; take it from the one to go on with")
        return self

    @model_validator(mode="after")
    def _weights_can_be_met(self) -> DataConfig:
        for weights in ({one.name: one.weight for one in self.sources}, *(phase.weights for phase in self.phases)):
            total = sum(weights.values())
            for name, weight in weights.items():
                if 0 < weight * LONGEST_TURN < total:
                    raise ValueError(
                        f"data.sources, {name}: weight={weight:g} of {total:g} is less than one sample in "
                        f"{LONGEST_TURN}; raise it, or leave the source out"
                    )
        return self

    @model_validator(mode="after")
    def _private_data_are_documents(self) -> DataConfig:
        if self.private and self.is_synthetic:
            raise ValueError("data.private is for documents, which synthetic-tokens are not; drop data.private")
        return self

    @property
    def for_record(self) -> DataConfig:
        """The section for the run's record: without a node's own keys if data is private."""
        if not self.private:
            return self
        fields = type(self).model_fields
        return self.model_copy(update={name: fields[name].get_default() for name in (*PRIVATE_KEYS, "cache_dir")})

    @property
    def is_synthetic(self) -> bool:
        """Whether the ids are generated, and stand for no text."""
        return any(isinstance(part.source, SyntheticTokensSource) for part in self.parts.values())

    @property
    def parts(self) -> Mapping[str, DataConfig]:
        """The section for each source separately, by name, with its part of the cache; "" for a single source."""
        if not self.sources:
            return {"": self}
        sharing = sum(isinstance(one.source, TokensSource) for one in self.sources)
        alone = {"sources": (), "phases": (), "cache_gb": self.cache_gb / max(sharing, 1)}
        return {one.name: self.model_copy(update={"source": one.source, **alone}) for one in self.sources}
