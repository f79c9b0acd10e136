"""Checks of this machine: versions, native library, compiler, slow fallbacks, descriptors, address, TCP settings."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from zeroband.checks.finding import Finding
from zeroband.checks.memory import has_gpu
from zeroband.config.model import LlamaConfig
from zeroband.config.outer import DemoConfig, DilocoConfig
from zeroband.config.schema import RunConfig
from zeroband.data.index import require_even_shares
from zeroband.elastic.transport.descriptors import descriptors_needed
from zeroband.errors import DISTRIBUTION, ConfigError
from zeroband.kernels import native
from zeroband.kernels.compiler import compiler_problem
from zeroband.observe.words import human_bytes

if TYPE_CHECKING:
    import torch

_IPV4 = Path("/proc/sys/net/ipv4")
_LARGE_WINDOW = 4 << 20
_SIOCGIFADDR = 0x8915


def versions() -> Iterator[Finding]:
    """Report the versions of packages and system."""
    yield Finding("zeroband", version(DISTRIBUTION))
    yield Finding("Python, system", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    for name in ("torch", "triton", "redis"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed")


def descriptors(config: RunConfig, nodes: int) -> Finding:
    """Check the descriptors for connections to `nodes`: a process raises its limit up to the hard one."""
    peers = max(1, nodes) if config.outer is not None else 1
    wanted = descriptors_needed(peers, config.comm.streams if needs_native(config) else config.comm.lanes)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "any number" if hard == resource.RLIM_INFINITY else str(hard)
    seen = f"{limit} may be open, {peers} nodes may need {wanted} on each"
    if hard == resource.RLIM_INFINITY or hard >= wanted:
        return Finding("open files", seen)
    way_out = "raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, docker --ulimit nofile=), or set comm.streams"
    return Finding("open files", seen, way_out, stops="start")


def compiler(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Report what torch.compile lacks on a CPU, if asked for; `slow_fallbacks` covers GPUs."""
    if config.train.compile and not has_gpu(environ) and (problem := compiler_problem(environ, for_gpu=False)):
        advice = "install them (Debian: build-essential, python3-dev), or set train.compile = false"
        yield Finding("compiler", f"train.compile = true compiles while training: {problem}", advice, stops="start")


def slow_fallbacks(config: RunConfig, device: torch.device) -> Iterator[Finding]:
    """Report missing features that slow a run down, with reason and cost; on a CPU only requested ones. Loads torch."""
    from zeroband.model.parallel import float8_problem

    if device.type == "cuda":
        yield from _slow_on_gpu(config, device)
    if config.train.float8 is not None and (why := float8_problem(device)):
        yield Finding("train.float8", f"off, {why}", "multiplies in bfloat16, which is up to a quarter slower")


def _slow_on_gpu(config: RunConfig, device: torch.device) -> Iterator[Finding]:
    import torch

    from zeroband.kernels.probe import triton_problem
    from zeroband.model.attention import attention_on

    why = ""
    if isinstance(config.model, LlamaConfig):
        _, why = attention_on(device, getattr(torch, config.train.dtype), config.model)
    if why and config.data.document_mask:
        yield Finding(
            "attention over packed documents", f"masked, {why}", "slower: bench/train_loop.py says by how much"
        )
    if not (why := triton_problem(device)):
        return
    way_out = "install triton and a C compiler with Python's headers (Debian: build-essential, python3-dev)"
    if config.train.compile is not False:
        yield Finding("torch.compile", f"off, {why}", f"costs about 15 % of the speed, and memory; {way_out}")
    if config.optim.state_dtype != "float32":
        yield Finding("optim.state_dtype", f"in plain torch, {why}", f"slower steps of the optimizer; {way_out}")
    if isinstance(config.outer, DemoConfig) or (
        isinstance(config.outer, DilocoConfig) and config.outer.state_device == "cuda"
    ):
        yield Finding(
            "outer kernels", f"in plain torch, {why}", f"slower: bench/kernels.py says by how much; {way_out}"
        )


def native_library(config: RunConfig) -> Iterator[Finding]:
    """Check the library of the native data path, and its encryption."""
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
    """Check that the ranks of this node can share its batch; yields only a problem."""
    try:
        require_even_shares(config.train.batch_size, local_world_size)
    except ConfigError as error:
        yield Finding("ranks", f"{local_world_size} on this node", str(error), stops="start")


def tcp_settings() -> Iterator[Finding]:
    """Check TCP's throughput on lossy and on long links. Linux."""
    if sys.platform != "linux":
        return
    available = _read(_IPV4 / "tcp_available_congestion_control")
    allowed = _read(_IPV4 / "tcp_allowed_congestion_control")
    if "bbr" in (available if os.geteuid() == 0 else allowed).split():
        yield Finding("congestion control", "bbr")
    else:
        advice = "on links with losses bbr is several times faster: modprobe tcp_bbr, and allow it in net.ipv4"
        yield Finding("congestion control", available or "unknown", advice)
    for name in ("tcp_rmem", "tcp_wmem"):
        largest = int((_read(_IPV4 / name).split() or ["0"])[-1])
        advice = (
            "" if largest >= _LARGE_WINDOW else f"long links need more streams with so little: raise net.ipv4.{name}"
        )
        yield Finding(f"largest {name}", human_bytes(largest), advice)


def look_at_address(host: str, config: RunConfig) -> Finding:
    """Check the address at which other nodes would reach this one."""
    interface = _interface_of(host)
    chosen = "node.advertise_host" if config.node.advertise_host else "the route to the store"
    mtu = _read(Path("/sys/class/net") / interface / "mtu") if interface else ""
    seen = f"{host} ({chosen})" + (f" on {interface}, MTU {mtu or 'unknown'}" if interface else "")
    if host.startswith("127.") or host == "::1":
        return Finding("address", seen, "only this machine reaches it: set node.advertise_host for others")
    if interface is None:
        return Finding("address", seen, "no interface has it: forward the port here, or set node.advertise_host")
    return Finding("address", seen)


def _interface_of(host: str) -> str | None:
    """Return the interface with this address, if any."""
    try:
        wanted = {str(found[4][0]) for found in socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)}
    except OSError:
        return None
    return next((name for name, address in _interface_addresses() if address in wanted), None)


def _interface_addresses() -> Iterator[tuple[str, str]]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asker, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no IPv4 address
                continue
            yield name, socket.inet_ntoa(answer[20:24])
    for line in _read(Path("/proc/net/if_inet6")).splitlines():
        digits, *_, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
