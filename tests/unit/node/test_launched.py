"""What a rank finds in its environment, and what it puts there before torch is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zeroband.node.launched import let_segments_grow

GROWING = "expandable_segments:True"


def test_cudas_allocator_enlarges_its_segments() -> None:
    environ = {"PATH": "/bin"}
    let_segments_grow(environ)
    assert environ == {"PATH": "/bin", "PYTORCH_ALLOC_CONF": GROWING}


@pytest.mark.slow
def test_trainer_sees_to_it_before_it_loads_torch() -> None:
    probe = (
        "import os, sys; from zeroband.train import main; "
        "print(main([]), os.environ['PYTORCH_ALLOC_CONF'], 'torch' in sys.modules)"
    )
    environ = {key: value for key, value in os.environ.items() if "ALLOC_CONF" not in key}
    done = subprocess.run([sys.executable, "-c", probe], env=environ, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"2 {GROWING} False\n", done.stderr  # nothing to train


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
@pytest.mark.parametrize("value", ["expandable_segments:False", "max_split_size_mb:128", ""])
def test_users_settings_of_the_allocator_stay(name: str, value: str) -> None:
    environ = {name: value}
    let_segments_grow(environ)
    assert environ == {name: value}
