"""Limits and tools of this machine that a run needs: descriptors, a compiler, the native library, equal shares."""

from __future__ import annotations

import resource
import shutil
import sysconfig
from collections.abc import Iterator, Mapping
from pathlib import Path

from zeroband.checks.finding import Finding
from zeroband.checks.memory import has_gpu
from zeroband.config.outer import DilocoConfig
from zeroband.config.schema import RunConfig
from zeroband.data.index import require_even_shares
from zeroband.elastic.transport.descriptors import needed
from zeroband.errors import ConfigError
from zeroband.kernels import native


def descriptors(config: RunConfig, nodes: int) -> Finding:
    """Room for the connections to so many nodes: a process raises its limit up to the hard one."""
    peers = max(1, nodes) if config.outer is not None else 1
    wanted = needed(peers, config.comm.streams if needs_native(config) else config.comm.lanes)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    seen = f"{limit} may be open, {peers} nodes may need {wanted} on each"
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return Finding("open files", seen)
    way_out = "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, docker --ulimit nofile=), or set comm.streams"
    return Finding("open files", seen, way_out, stops="start")


def compiler(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """What torch.compile and Triton run while training: a C++ compiler on CPUs, one for C on GPUs, Python's headers."""
    on_gpu = has_gpu(environ)
    fuses = on_gpu and isinstance(config.outer, DilocoConfig) and config.outer.state_device == "cuda"
    if not (config.train.compile or fuses):
        return
    why = "train.compile = true" if config.train.compile else 'outer.state_device = "cuda"'
    off = "train.compile = false" if config.train.compile else 'outer.state_device = "cpu"'
    named, usual = ("CC", ("gcc", "clang")) if on_gpu else ("CXX", ("g++",))
    candidates = (environ[named],) if environ.get(named) else usual
    found = next((path for name in candidates if (path := shutil.which(name, path=environ.get("PATH", "")))), None)
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    advice = f"install them (Debian: build-essential, python3-dev), or set {off}"
    if found is None:
        seen = f"{why} runs {' or '.join(candidates)} while training, which is not on the PATH"
        yield Finding("compiler", seen, advice, stops="start")
    elif not headers.is_file():
        seen = f"{why} compiles against Python's headers, and {headers} is missing"
        yield Finding("compiler", seen, advice, stops="start")
    else:
        yield Finding("compiler", found)


def native_library(config: RunConfig) -> Iterator[Finding]:
    """The library of the native data path, and its encryption."""
    is_needed, problem = needs_native(config), native.problem()
    if problem is not None:
        yield Finding("native library", "missing", problem, stops="start" if is_needed else None)
    else:
        yield Finding("native library", f"codecs for {', '.join(native.variants())}")
    if not is_needed:
        yield Finding("encryption", "not applicable: nothing is averaged on the native data path")
        return
    reason = None if problem else native.load().zb_sealing_problem()
    if reason is None:
        yield Finding("encryption", "AES-256-GCM of libcrypto" if config.comm.encryption else "off, as configured")
        return
    advice = "install OpenSSL (libssl3), or set comm.encryption = false where you trust every network between the nodes"
    yield Finding("encryption", reason.decode(), advice, stops="start" if config.comm.encryption else None)


def needs_native(config: RunConfig) -> bool:
    """Whether this run averages on the native data path."""
    return config.outer is not None and config.comm.backend == "native"


def shares(config: RunConfig, local_world_size: int) -> Iterator[Finding]:
    """Whether the ranks of this node can share its batch; says nothing where they can."""
    try:
        require_even_shares(config.train.batch_size, local_world_size)
    except ConfigError as error:
        yield Finding("ranks", f"{local_world_size} on this node", str(error), stops="start")
