"""What one machine shows of itself: versions, what `checks` look at, address, TCP settings."""

from __future__ import annotations

import fcntl
import os
import platform
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import zeroband
from zeroband.checks.finding import Finding, size_text
from zeroband.checks.inputs import open_inputs
from zeroband.checks.memory import gpus
from zeroband.checks.needs import Needs
from zeroband.checks.quick import quick_checks
from zeroband.checks.slow_fallbacks import slow_fallbacks
from zeroband.config.schema import RunConfig
from zeroband.errors import ConfigError
from zeroband.node.launched import local_world_size
from zeroband.node.mesh import device_kind

_IPV4 = Path("/proc/sys/net/ipv4")
_LARGE_WINDOW = 4 << 20
_SIOCGIFADDR = 0x8915


def look_at_machine(config: RunConfig, environ: Mapping[str, str], nodes: int | None = None) -> Iterator[Finding]:
    """Everything that needs no other machine: what a trainer checks at its start, and what it would open after that."""
    yield Finding("zeroband", zeroband.__version__)
    yield Finding("Python, system", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield from _packages()
    opened = open_inputs(config)
    yield from opened.findings
    needs = Needs(config, opened.vocab_size, opened.sections, opened.built_params)
    yield from quick_checks(config, environ, needs=needs, nodes=nodes)
    try:
        device = torch.device(device_kind(config.train.device))
    except ConfigError as error:
        yield Finding("train.device", "cannot be used", str(error), stops="start")
    else:
        yield from gpus(needs, device, local_world_size(environ))
        yield from slow_fallbacks(config, device)
    yield from _tcp()


def _packages() -> Iterator[Finding]:
    for name in ("torch", "triton", "redis"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed")


def _tcp() -> Iterator[Finding]:
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
        yield Finding(f"largest {name}", size_text(largest), advice)


def look_at_address(host: str, config: RunConfig) -> Finding:
    """The address under which the others would reach this node."""
    interface = _interface_of(host)
    chosen = "node.advertise_host" if config.node.advertise_host else "the route to the store"
    seen = f"{host} ({chosen})" + (f" on {interface}, MTU {_mtu(interface)}" if interface else "")
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


def _mtu(interface: str) -> str:
    return _read(Path("/sys/class/net") / interface / "mtu") or "unknown"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
