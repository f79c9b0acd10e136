"""What this machine is: versions, the native library, a compiler, descriptors, equal shares, address, TCP settings."""

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

import zeroband
from zeroband.checks.finding import Finding
from zeroband.checks.memory import has_gpu
from zeroband.config.schema import RunConfig
from zeroband.data.index import require_even_shares
from zeroband.elastic.transport.descriptors import descriptors_needed
from zeroband.errors import ConfigError
from zeroband.kernels import native
from zeroband.kernels.compiler import compiler_problem
from zeroband.observe.words import human_bytes

_IPV4 = Path("/proc/sys/net/ipv4")
_LARGE_WINDOW = 4 << 20
_SIOCGIFADDR = 0x8915


def versions() -> Iterator[Finding]:
    """What is installed, on which system."""
    yield Finding("zeroband", zeroband.__version__)
    yield Finding("Python, system", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    for name in ("torch", "triton", "redis"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed")


def descriptors(config: RunConfig, nodes: int) -> Finding:
    """Room for the connections to `nodes`: a process raises its limit up to the hard one."""
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


def tcp_settings() -> Iterator[Finding]:
    """How fast TCP may be on links with losses and on long ones. Linux."""
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
    """The address under which the others would reach this node."""
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
    """The interface that has this address; None where none has."""
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
            except OSError:  # it has none of IPv4
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
