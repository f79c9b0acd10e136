"""A node of several machines: its machines agree on the configuration, and refuse what such a node cannot do yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from zeroband.config import RunConfig
from zeroband.config.outer import DilocoConfig
from zeroband.errors import ConfigError
from zeroband.kernels.formats import FORMATS
from zeroband.node.mesh import LocalMesh, broadcast_json, gather_json
from zeroband.node.names import node_id_of

_OF_MACHINES = ("node.", "run.dir", "data.cache_dir", "log_level")
"""Beginnings of keys that may differ between the machines of a node. The first one's [node] speaks for the node."""


def agree(config: RunConfig, local: LocalMesh) -> RunConfig:
    """Return this machine's configuration with the node's name. Called by all ranks.

    Raises ConfigError if the machines differ, or for what `require_supported` refuses.
    """
    if local.machines == 1:
        return config
    require_supported(config)
    first = broadcast_json({"name": node_id_of(config), "set": dict(_values(config))}, local)
    own = dict(_values(config))
    differ = [key for key in sorted(own.keys() | first["set"].keys()) if own.get(key) != first["set"].get(key)]
    differ = next(filter(None, gather_json(differ, local)), [])
    if differ:
        raise ConfigError(
            f"the machines of this node have different settings: {', '.join(differ)}; start all with the same "
            "configuration and options"
        )
    return config.model_copy(update={"node": config.node.model_copy(update={"id": first["name"]})})


def _values(config: RunConfig) -> Iterator[tuple[str, Any]]:
    for key, value in _leaves(config.model_dump(mode="json"), ""):
        if not key.startswith(_OF_MACHINES):
            yield key, value


def _leaves(values: Mapping[str, Any], before: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def require_supported(config: RunConfig) -> None:
    """Raise ConfigError for what only works where all ranks of a node share one machine's memory."""
    refused, outer = dict[str, str](), config.outer
    if outer is not None and not isinstance(outer, DilocoConfig):
        refused["outer.type"] = '"diloco"'
    if isinstance(outer, DilocoConfig) and outer.state_device != "cpu":
        refused["outer.state_device"] = '"cpu"'
    if outer is not None and FORMATS[config.codec_name].needs_feedback:
        refused["comm.codec"] = '"int8"'
    if config.comm.backend != "native":
        refused["comm.backend"] = '"native"'
    if config.optim.state_dtype != "float32":
        refused["optim.state_dtype"] = '"float32"'
    if refused:
        raise ConfigError(
            "a node of several machines cannot do that yet: set "
            + ", ".join(f"{key} = {value}" for key, value in refused.items())
            + ", or make each machine a node of the run"
        )
