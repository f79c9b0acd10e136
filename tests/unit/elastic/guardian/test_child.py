"""Child processes of the trainer: their pipes and imports; each node starts two."""

from __future__ import annotations

import fcntl
import os
import resource
import subprocess
import sys

import pytest

from zeroband.elastic.guardian.child import is_readable


@pytest.mark.parametrize(
    ("module", "spared"),
    [("process", {"numpy", "torch"}), ("port_holder", {"numpy", "pydantic", "redis", "torch"})],
)
def test_child_module_loads_without_torch(module: str, spared: set[str]) -> None:
    asked = f"import sys, zeroband.elastic.guardian.{module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout.split()
    assert spared & set(loaded) == set()


def test_pipe_with_a_large_descriptor_can_be_polled() -> None:
    """A trainer with many files has descriptors above the limit of `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    low, writer = os.pipe()
    try:
        with os.fdopen(fcntl.fcntl(low, fcntl.F_DUPFD, 1024), "rb", buffering=0) as reader:
            assert not is_readable(reader, 0)
            os.write(writer, b"holding\n")
            assert is_readable(reader, 10)
    finally:
        os.close(low)
        os.close(writer)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
