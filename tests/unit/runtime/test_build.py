"""What a node must agree on with the others, as its trainer is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeroband.config import load_config
from zeroband.elastic.membership.departure import Departure
from zeroband.node.mesh import LocalMesh
from zeroband.runtime.build import build_trainer

DEVICE = "train.device (rounds the nodes' common step)"
SMALL: dict[str, Any] = {
    "model.d_model": 16,
    "model.n_layers": 1,
    "model.n_heads": 2,
    "data.seq_length": 16,
    "train.dtype": "float32",
    "data.source.type": "synthetic",
    "data.source.documents": 40,
    "store.url": "redis://localhost",
}


@pytest.mark.parametrize(("outer", "shares_device"), [("ddp", True), ("diloco", False), ("demo", False)])
def test_nodes_agree_on_the_kind_of_device_where_they_share_steps_of_adamw_and_never_on_the_type(
    local: LocalMesh, tmp_path: Path, outer: str, shares_device: bool
) -> None:
    chosen = {**SMALL, "data.cache_dir": tmp_path, "outer.type": outer}
    node = build_trainer(load_config([f"--{k}={v}" for k, v in chosen.items()], {}), local, Departure(1.0))
    node.loader.close()
    assert node.shared.get(DEVICE) == ("cpu" if shares_device else None)
    assert "train.batch_size" in node.shared and not {"train.dtype", "train.device"} & node.shared.keys()
