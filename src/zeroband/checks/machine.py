"""Limits and tools of this machine that a run needs: descriptors, a compiler, the native library, equal shares."""

from __future__ import annotations

import resource
from collections.abc import Iterator, Mapping

from zeroband.checks.finding import Finding
from zeroband.checks.memory import has_gpu
from zeroband.config.schema import RunConfig
from zeroband.data.index import require_even_shares
from zeroband.elastic.transport.descriptors import needed
from zeroband.errors import ConfigError
from zeroband.kernels import native
from zeroband.kernels.compiler import compiler_problem


def descriptors(config: RunConfig, nodes: int) -> Finding:
    """Allocator for the connections to so many nodes: a process raises its limit up to the hard one."""
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
    """What torch.compile lacks on a CPU, where it is asked for; `slow_fallbacks` says what a GPU does without it."""
    if config.train.compile and not has_gpu(environ) and (problem := compiler_problem(environ, for_gpu=False)):
        advice = "install them (Debian: build-essential, python3-dev), or set train.compile = false"
        yield Finding("compiler", f"train.compile = true compiles while training: {problem}", advice, stops="start")


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
