"""The device of these tests, by `--on`: `cuda` is the first GPU; `cpu` tries the tests out on a machine without one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from zeroband.node.mesh import LocalMesh, init_local_mesh


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    device = torch.device(request.config.getoption("--on") or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU, and --on cuda")
    return device


@pytest.fixture(scope="module")
def mesh(device: torch.device) -> Iterator[LocalMesh]:
    """The only rank of a node, on the device."""
    mesh = init_local_mesh(environ={})
    assert mesh.device.type == device.type
    yield mesh
    mesh.close()
