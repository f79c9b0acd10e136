"""The optional packages that a configuration needs. Imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from zeroband.checks.finding import Finding
from zeroband.config.data import ChatSource, FilesSource, HuggingFaceSource, Source, TokensSource
from zeroband.config.schema import RunConfig
from zeroband.errors import way_to_extra

_EXTRA_OF = {
    "s3fs": "s3",
    "gcsfs": "gcs",
    "transformers": "hf",
    "datasets": "hf",
    "huggingface_hub": "hf",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "prometheus_client": "prometheus",
    "torchao": "torchao",
}
"""Extra that installs a module."""

_MODULE_OF = {
    "prometheus": "prometheus_client",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""Module of a section of [observe]."""


def missing_packages(config: RunConfig) -> Iterator[Finding]:
    """Return a finding for each key whose value needs a missing package."""
    for key, module in _needed(config):
        if find_spec(module) is None:
            extra = _EXTRA_OF.get(module)
            advice = way_to_extra(extra) if extra else f"install the package that brings {module}"
            yield Finding("packages", f"{key} needs {module}, which is not installed", advice, stops="start")


def unknown_protocols(config: RunConfig) -> Iterator[Finding]:
    """Return a finding for each URL with an unsupported protocol."""
    for key, protocol in _protocols(config):
        if protocol not in _implementations():
            advice = "use s3://, gs://, https:// or a path"
            yield Finding("packages", f"{key}: nothing opens {protocol}://", advice, stops="start")


def _needed(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key and value, module)."""
    if config.data.tokenizer != "byte" and not config.data.is_synthetic:
        yield f"data.tokenizer={config.data.tokenizer!r}", "transformers"
    for key, source in _sources(config):
        if isinstance(source, ChatSource):
            yield f"{key}.type='chat'", "transformers"
        if isinstance(source, HuggingFaceSource):
            yield f"{key}.type='huggingface'", "datasets"
    if config.train.float8 is not None:
        yield f"train.float8={config.train.float8!r}", "torchao"
    if config.optim.state_dtype != "float32":
        yield f"optim.state_dtype={config.optim.state_dtype!r}", "torchao"
    yield from ((f"observe.{name}", module) for name, module in _MODULE_OF.items() if getattr(config.observe, name))
    for key, protocol in _protocols(config):
        if implementation := _implementations().get(protocol):
            root = str(implementation["class"]).partition(".")[0]
            if root != "fsspec":
                yield key, root


def _protocols(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key and value, protocol) of every URL."""
    values: list[tuple[str, str | None]] = []
    for key, source in _sources(config):
        if isinstance(source, FilesSource):
            values += [(f"{key}.paths", path) for path in source.paths]
        if isinstance(source, TokensSource):
            values.append((f"{key}.path", source.path))
    values += [("ckpt.path", config.ckpt.path), ("resume.path", config.resume.path if config.resume else None)]
    for key, value in values:
        if value is not None and "://" in value:
            yield f"{key}={value!r}", value.partition("://")[0].rpartition("::")[2]


def _sources(config: RunConfig) -> Iterator[tuple[str, Source]]:
    """Yield (key, source) of each training source."""
    for name, part in config.data.parts.items():
        yield f"data.sources, {name}: source" if name else "data.source", part.source


def _implementations() -> dict[str, dict[str, str]]:
    """Return fsspec's protocols; plain paths are one of them."""
    registry: Any = import_module("fsspec.registry")  # has no types
    return registry.known_implementations
