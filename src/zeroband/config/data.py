"""The [data] section: what it is trained on, one tagged variant for each kind of source."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from zeroband.config.section import NAME_PATTERN, NODE_LOCAL, Section

LONGEST_TURN = (1 << 31) - 1
"""Samples among which each source of a mixture has at least one: two such numbers multiply within 64 bits."""


class TextSource(Section):
    """Plain text files."""

    type: Literal["text"] = "text"
    paths: tuple[str, ...] = Field(default=(), json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs; one document each. Empty: this machine's Python standard library."""
    binary: bool = False
    """Take bytes that are no text in UTF-8 as they are, for models of bytes; needs data.tokenizer = "byte". False: they
    are refused."""


class JsonlSource(Section):
    """JSON Lines files."""

    type: Literal["jsonl"]
    paths: tuple[str, ...] = Field(min_length=1, json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs of JSON Lines, also `.gz`, `.bz2`, `.xz`, `.zst`; one document each line."""
    field: str = "text"
    """Key that holds the document."""


class ParquetSource(Section):
    """Parquet files."""

    type: Literal["parquet"]
    paths: tuple[str, ...] = Field(min_length=1, json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs of Parquet; one document each row."""
    column: str = "text"
    """Column that holds the document."""
    binary: bool = False
    """Take bytes that are no text in UTF-8 as they are, for models of bytes; needs data.tokenizer = "byte". False: they
    are refused."""


class HuggingFaceSource(Section):
    """A dataset by its name on the Hugging Face Hub, or a folder of one."""

    type: Literal["huggingface"]
    name: str
    """Name or local path for `datasets.load_dataset`; needs the extra `hf`."""
    subset: str | None = None
    """Configuration of the data set."""
    split: str = "train"
    """Split of the data set."""
    column: str = "text"
    """Column that holds the document."""
    binary: bool = False
    """Take bytes that are no text in UTF-8 as they are, for models of bytes; needs data.tokenizer = "byte". False: they
    are refused."""


class ChatSource(Section):
    """JSON Lines files of conversations, to fine-tune on what the assistant says in them."""

    type: Literal["chat"]
    paths: tuple[str, ...] = Field(min_length=1, json_schema_extra=NODE_LOCAL)
    """Files, globs or fsspec URLs of JSON Lines, also `.gz`, `.bz2`, `.xz`, `.zst`; one conversation each line."""
    field: str = "messages"
    """Key that holds the messages: objects with `role` and `content`, or with `from` and `value`."""
    template: str | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Jinja template that writes a conversation as text, or the file of one. None: the tokenizer's own."""


class SyntheticSource(Section):
    """Text that is made up, for tests and simulations."""

    type: Literal["synthetic"]
    documents: PositiveInt = 1000
    """How many documents the seed makes."""
    mean_length: PositiveInt = 512
    """Mean length of a document in bytes."""


class SyntheticTokensSource(Section):
    """Token ids that are made up, to measure speed: no tokenizer, no download, nothing to prepare or to store."""

    type: Literal["synthetic-tokens"]
    tokens: PositiveInt = 1_000_000_000
    """How many ids the seed makes, of data.vocab_size, ends of documents among them."""
    mean_document_length: PositiveInt = 500
    """Mean length of a document in tokens; short ones are frequent, long ones rare."""


class TokensSource(Section):
    """Token ids that were made before, by `zeroband data prepare` or another trainer's tools, read where they lie."""

    type: Literal["tokens"]
    path: str = Field(json_schema_extra=NODE_LOCAL)
    """Folder that `zeroband data prepare` wrote, or files of another format: a path, a glob or an fsspec URL (`s3://`,
    `gs://`, `https://`, `hf://`). What is not on a disk of this machine is fetched piece by piece, as it is needed."""
    format: Literal["zeroband", "nanogpt", "llm.c", "megatron", "litdata"] = "zeroband"
    """Layout of the files. nanogpt: ids and nothing else. llm.c: ids behind a header. megatron: `.bin` with `.idx`.
    litdata: a folder of chunks of its TokensLoader."""
    dtype: Literal["uint16", "uint32"] | None = None
    """Type of the ids of nanogpt and litdata, whose files do not say it. None: uint16 if the vocabulary fits in it."""


BytesSource = TextSource | ParquetSource | HuggingFaceSource
"""Sources whose documents may be bytes that are no text."""

FilesSource = TextSource | JsonlSource | ParquetSource | ChatSource
"""Sources that name their files."""

DocumentSource = TextSource | JsonlSource | ParquetSource | HuggingFaceSource | SyntheticSource
"""Sources of text, which a tokenizer makes into ids."""

Source = Annotated[DocumentSource | ChatSource | TokensSource | SyntheticTokensSource, Field(discriminator="type")]


class MixtureSource(Section):
    """One of the sources of a mixture."""

    name: str = Field(pattern=NAME_PATTERN)
    """Name of the source in metrics and in data.phases."""
    weight: PositiveFloat
    """Share of the samples that come from it, relative to the weights of the others; their sum does not matter."""
    max_passes: PositiveFloat | None = None
    """Passes over it after which the other sources take its share. None: no limit, which one source must have."""
    source: Source
    """Where its documents come from."""


class Phase(Section):
    """Other weights from one place of a run on."""

    from_tokens: PositiveInt
    """Tokens that the run has dealt out when they begin to hold."""
    weights: dict[str, float]
    """Weights of all sources, by name; 0 leaves one out."""


OWN_WHERE_PRIVATE = ("source", "sources", "phases")
"""Keys of [data] that each node has for itself where data.private is set."""


class DataConfig(Section):
    """What is trained on."""

    source: Source = TextSource()
    """Where the documents come from."""
    sources: tuple[MixtureSource, ...] = ()
    """Several sources instead of one, mixed by weight: `[[data.sources]]` tables in a file, JSON on a command line."""
    phases: tuple[Phase, ...] = ()
    """Changes of the weights of data.sources on the way, the first one first: `[[data.phases]]` tables."""
    tokenizer: str = Field(default="byte", json_schema_extra=NODE_LOCAL)
    """`byte` (257 ids: the bytes and end of document), or the name or path of a Hugging Face tokenizer (extra `hf`),
    the same on all nodes. Unless it is set, a model that has a model.name brings its own."""
    vocab_size: int | None = Field(default=None, ge=2)
    """Ids that the model has room for, at least those of the tokenizer; decides the model's size together with [model],
    and what synthetic-tokens draw from. None: as many as the tokenizer has."""
    seq_length: PositiveInt = 1024
    """Tokens in one sample."""
    document_mask: bool = True
    """Attention does not cross the border between two documents packed into one sample."""
    packing: Literal["concatenate", "best-fit"] = "concatenate"
    """How documents fill samples. concatenate: end to end, cut where a sample ends. best-fit: none is cut that fits
    into a sample, for about a hundredth of padding; ids made by `zeroband data prepare` must have been packed so."""
    skip_bad_rows: bool = False
    """Leave out rows, lines and files of text that cannot be used (no JSON, no such field, no UTF-8, a conversation
    that the template cannot write), and count them. False: the first one is refused by its place."""
    private: bool = False
    """Each node trains on its own documents, which never leave it: data.source, data.sources and data.phases may
    differ, and each node's samples are counted by themselves. False: all nodes share one corpus, and who reads what is
    dealt out."""
    shuffle_blocks: PositiveInt | None = 2048
    """Blocks of 65,536 tokens, from anywhere in prepared ids, that are mixed at a time: a node fetches no others for
    the samples that it is dealt. None: all are mixed at once, and each sample is a block to fetch."""
    cache_dir: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Where tokenised documents, and what is fetched of ids that lie elsewhere, are kept between runs. None: `zeroband`
    in the user's cache folder."""
    cache_gb: PositiveFloat = Field(default=20.0, json_schema_extra=NODE_LOCAL)
    """Gigabytes of fetched ids that this node keeps at most; what was not used for longest makes room."""
    retry_s: PositiveFloat = Field(default=900.0, json_schema_extra=NODE_LOCAL)
    """How long a storage that does not answer, or refuses for now, is asked again before this node gives up."""
    hold_out: float = Field(default=0.005, ge=0, lt=0.5)
    """Share of the samples kept back from training, for evaluation."""

    @model_validator(mode="after")
    def _bytes_are_for_byte_models(self) -> DataConfig:
        sources = [self.source, *(one.source for one in self.sources)]
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
        if (isinstance(self.source, SyntheticTokensSource) or any(made_up)) and self.vocab_size is None:
            raise ValueError(
                "data.source.type='synthetic-tokens' needs data.vocab_size, the number of ids to draw from, such as "
                "32000: no tokenizer is opened for them"
            )
        if (isinstance(self.source, SyntheticTokensSource) or any(made_up)) and self.packing != "concatenate":
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
        sources = [self.source, *(one.source for one in self.sources)]
        if self.private and any(isinstance(one, SyntheticTokensSource) for one in sources):
            raise ValueError("data.private is for documents, which synthetic-tokens are not; drop data.private")
        return self

    @property
    def shown_to_others(self) -> DataConfig:
        """The section as the record of the run has it: without what is a node's own where data is private."""
        if not self.private:
            return self
        fields = type(self).model_fields
        return self.model_copy(update={name: fields[name].get_default() for name in (*OWN_WHERE_PRIVATE, "cache_dir")})

    @property
    def is_made_up(self) -> bool:
        """Whether its ids are made up and stand for no text."""
        return any(isinstance(part.source, SyntheticTokensSource) for part in self.parts.values())

    @property
    def parts(self) -> Mapping[str, DataConfig]:
        """The section as each source alone would have it, by name, with its part of the cache; "" if there is one."""
        if not self.sources:
            return {"": self}
        sharing = sum(isinstance(one.source, TokensSource) for one in self.sources)
        alone = {"sources": (), "phases": (), "cache_gb": self.cache_gb / max(sharing, 1)}
        return {one.name: self.model_copy(update={"source": one.source, **alone}) for one in self.sources}
