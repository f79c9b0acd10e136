"""A model of transformers on a GPU, sharded, compiled and in bfloat16: it learns what float32 on a CPU learns."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.unit.model.foreign import hub_section, trained_with

from zeroband.node.mesh import LocalMesh, init_local_mesh
from zeroband.runtime.loop import forward_backward

pytest.importorskip("transformers", reason="needs the extra hf")

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture
def local() -> Iterator[LocalMesh]:
    mesh = init_local_mesh(environ={})
    yield mesh
    mesh.close()
    torch.compiler.reset()


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "mixtral"])
def test_first_losses_are_those_of_float32_on_a_cpu(
    family: str, local: LocalMesh, device: torch.device, tmp_path: Path
) -> None:
    cpu = LocalMesh(0, 1, torch.device("cpu"), local.mesh, local.control)
    losses = []
    for mesh, dtype in ((cpu, "float32"), (local, "bfloat16")):
        node = trained_with(hub_section(family), mesh, tmp_path, train={"dtype": dtype})
        node.loader.assign([(0, 12)])
        steps = []
        for _ in range(3):
            passed = forward_backward(node)
            node.inner.step()
            node.inner.zero_grad()
            steps.append(passed.nats.item() / passed.tokens)
        losses.append(steps)
    assert node.local.device.type == device.type
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
