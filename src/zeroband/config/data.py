"""The [data] section: what it is trained on, one tagged variant for each kind of source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt, model_validator

from zeroband.config.section import NODE_LOCAL, Section


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
    """Files, globs or fsspec URLs of JSON Lines (`.gz` and `.zst` by their ending); one document each line."""
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
    """Files, globs or fsspec URLs of JSON Lines (`.gz` and `.zst` by their ending); one conversation each line."""
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


BytesSource = TextSource | ParquetSource | HuggingFaceSource
"""Sources whose documents may be bytes that are no text."""

FilesSource = TextSource | JsonlSource | ParquetSource | ChatSource
"""Sources that name their files."""

DocumentSource = TextSource | JsonlSource | ParquetSource | HuggingFaceSource | SyntheticSource
"""Sources of text, which a tokenizer makes into ids."""

Source = Annotated[DocumentSource | ChatSource | SyntheticTokensSource, Field(discriminator="type")]


class DataConfig(Section):
    """What is trained on."""

    source: Source = TextSource()
    """Where the documents come from."""
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
    cache_dir: Path | None = Field(default=None, json_schema_extra=NODE_LOCAL)
    """Where the tokenised documents are kept between runs. None: `zeroband` in the user's cache folder."""
    hold_out: float = Field(default=0.005, ge=0, lt=0.5)
    """Share of the samples kept back from training, for evaluation."""

    @model_validator(mode="after")
    def _bytes_are_for_byte_models(self) -> DataConfig:
        if isinstance(self.source, BytesSource) and self.source.binary and self.tokenizer != "byte":
            raise ValueError(
                f'data.source.binary=true needs data.tokenizer = "byte", not {self.tokenizer!r}: other tokenizers take '
                "text alone"
            )
        return self

    @model_validator(mode="after")
    def _made_up_ids_are_of_a_vocabulary(self) -> DataConfig:
        if isinstance(self.source, SyntheticTokensSource) and self.vocab_size is None:
            raise ValueError(
                "data.source.type='synthetic-tokens' needs data.vocab_size, the number of ids to draw from, such as "
                "32000: no tokenizer is opened for them"
            )
        return self
