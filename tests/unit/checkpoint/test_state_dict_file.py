"""State dicts as safetensors: all that they hold comes back, and nothing in them is run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from zeroband.checkpoint.state_dict_file import pack, unpack
from zeroband.errors import CheckpointDamaged, ConfigError


def test_what_is_packed_comes_back() -> None:
    tree: dict[str, Any] = {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.arange(6.0).view(2, 3).T}, 1: {}},
        "betas": (0.9, 0.999),
        "numbers": [1, 2.5, True, None, "x", b"\x00\xff", math.inf, 2**80],
        "half": torch.ones(2, dtype=torch.bfloat16),
        "ids": np.arange(3, dtype=np.int16),
        "count": np.int64(7),
        (1, "a"): {},
    }
    found = unpack(pack(tree, "state"))
    assert list(found) == list(tree)
    assert found["betas"] == (0.9, 0.999) and found["numbers"] == tree["numbers"] and found["count"] == 7
    assert torch.equal(found["state"][0]["exp_avg"], tree["state"][0]["exp_avg"]) and found["state"][1] == {}
    assert torch.equal(found["half"], tree["half"]) and found["half"].dtype == torch.bfloat16
    assert (found["ids"] == tree["ids"]).all() and found["ids"].dtype == np.int16


def test_what_cannot_be_packed_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"^state\['sampler'\]\[1\] is a object, which a checkpoint does not hold"):
        pack({"sampler": [1, object()]}, "state")


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04K\x01.", pack({"x": torch.ones(3)}, "x")[:-1], b"\x02" + bytes(7) + b"{}"]
)
def test_other_files_are_refused(data: bytes) -> None:
    with pytest.raises(CheckpointDamaged, match="it holds no state dicts"):
        unpack(data)
