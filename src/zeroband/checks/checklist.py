"""The list of all checks: those of a trainer's start, and the slower ones of `doctor`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zeroband.checkpoint.ownership import require_place
from zeroband.checks.disk import disks
from zeroband.checks.extras import missing_packages, unknown_protocols
from zeroband.checks.finding import Finding
from zeroband.checks.inputs import local_inputs, open_inputs
from zeroband.checks.machine import (
    compiler,
    descriptors,
    native_library,
    shares,
    slow_fallbacks,
    tcp_settings,
    versions,
)
from zeroband.checks.memory import gpus, host_memory, shared_memory
from zeroband.checks.needs import Needs
from zeroband.config.load import load_config, require_asked
from zeroband.config.schema import RunConfig
from zeroband.errors import ConfigError
from zeroband.node.faults import FaultPoints
from zeroband.node.launched import local_world_size


def asked_config(argv: Sequence[str]) -> RunConfig:
    """Load the configuration of a run. Raises ConfigError if it cannot be what the user meant."""
    config = load_config(argv)
    require_asked(argv)
    FaultPoints(config.fault.inject)
    if config.ckpt.path is not None:
        require_place(config.ckpt.path, config.run.id)
    return config


def quick_checks(
    config: RunConfig, environ: Mapping[str, str], *, needs: Needs | None = None, nodes: int | None = None
) -> Iterator[Finding]:
    """Check this machine without torch and without the network.

    `needs`: as far as known; None: their minimum. `nodes`: None: those that the run waits for.
    """
    needs = needs or Needs(config)
    nodes = nodes or max(config.elastic.start_nodes, config.elastic.min_nodes)
    yield from unknown_protocols(config)
    yield from missing_packages(config)
    yield from native_library(config)
    yield from compiler(config, environ)
    yield descriptors(config, nodes)
    yield from shares(config, local_world_size(environ))
    yield from local_inputs(config)
    yield shared_memory(needs, environ)
    yield host_memory(needs, environ)
    yield from disks(needs)


def all_checks(config: RunConfig, environ: Mapping[str, str], nodes: int | None = None) -> Iterator[Finding]:
    """Check everything that needs no other machine: the quick checks, and what a trainer would open next."""
    import torch

    from zeroband.node.mesh import device_kind

    yield from versions()
    opened, needs = open_inputs(config)
    yield from opened
    yield from quick_checks(config, environ, needs=needs, nodes=nodes)
    try:
        device = torch.device(device_kind(config.train.device))
    except ConfigError as error:
        yield Finding("train.device", "cannot be used", str(error), stops="start")
    else:
        yield from gpus(needs, device, local_world_size(environ))
        yield from slow_fallbacks(config, device)
    yield from tcp_settings()
