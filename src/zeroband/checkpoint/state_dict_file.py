"""State dicts as safetensors files, whose header holds the tree around the tensors as JSON. Never pickle.

For the state of a user's loop: of an optimizer, a sampler, a gradient scaler. Reading it runs no code.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from zeroband.errors import CheckpointDamaged, ConfigError
from zeroband.node.sharding import is_sharded

_TREE = "tree"
_PLAIN = (str, int, float, bool)
_LENGTH_BYTES = 8


def pack(tree: Any, name: str) -> bytes:
    """Write a tree of dicts, lists, tuples, numbers, strings, bytes, arrays and tensors on any device.

    `name`: for errors. Raises ConfigError with the path of an unsupported value.
    """
    tensors: dict[str, Tensor] = {}
    said = json.dumps(_encoded(tree, name, tensors))
    return save(tensors, {_TREE: said})


def unpack(data: bytes) -> Any:
    """Read a packed tree, with tensors on CPU. Raises CheckpointDamaged."""
    try:
        length = int.from_bytes(data[:_LENGTH_BYTES], "little")
        header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
        return _decoded(json.loads(header["__metadata__"][_TREE]), load(data))
    except (SafetensorError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise CheckpointDamaged(f"it holds no state dicts: {error!r:.200}") from error


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Encode plain values as themselves, all others as [kind, content]."""
    if value is None or type(value) in _PLAIN:
        return value
    match value:
        case Tensor() if not is_sharded(value):
            key = str(len(tensors))
            tensors[key] = value.detach().to("cpu", copy=True).contiguous()
            return ["tensor", key]
        case np.ndarray():
            return ["array", _encoded(torch.from_numpy(np.array(value)), path, tensors)]
        case np.generic():
            return _encoded(value.item(), path, tensors)
        case bytes():
            return ["bytes", base64.b64encode(value).decode()]
        case Mapping():
            pairs = cast("Mapping[Any, Any]", value).items()
            encoded = [[_encoded(k, path, tensors), _encoded(v, f"{path}[{k!r}]", tensors)] for k, v in pairs]
            return ["dict", encoded]
        case list() | tuple():
            items = cast("list[Any] | tuple[Any, ...]", value)
            kind = "list" if isinstance(value, list) else "tuple"
            return [kind, [_encoded(one, f"{path}[{at}]", tensors) for at, one in enumerate(items)]]
        case _:
            raise ConfigError(
                f"{path} is a {type(value).__name__}, which a checkpoint does not hold; have the state_dict give "
                "numbers, strings, bytes, lists, dicts, arrays and whole tensors"
            )


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = cast("list[Any]", value)
    match kind:
        case "tensor":
            return tensors[content]
        case "array":
            return _decoded(content, tensors).numpy()
        case "bytes":
            return base64.b64decode(content)
        case "dict":
            return {_decoded(key, tensors): _decoded(held, tensors) for key, held in content}
        case "list":
            return [_decoded(one, tensors) for one in content]
        case "tuple":
            return tuple(_decoded(one, tensors) for one in content)
        case _:
            raise ValueError(f"unknown kind {kind!r}")
