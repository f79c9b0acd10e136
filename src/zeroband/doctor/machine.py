"""What one machine shows of itself: versions, memory, address, TCP settings. Every check says what to do about it."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import zeroband
from zeroband.config.outer import CustomConfig, DdpConfig, DemoConfig, DilocoConfig, SparseLocoConfig
from zeroband.config.schema import RunConfig
from zeroband.data.tokenizer import open_tokenizer
from zeroband.errors import ConfigError
from zeroband.kernels import native
from zeroband.model.size import parameter_count
from zeroband.outer.custom import load_algorithm
from zeroband.plane_parts import codec_of

_IPV4 = Path("/proc/sys/net/ipv4")
_LARGE_WINDOW = 4 << 20
_SIOCGIFADDR = 0x8915


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `advice`: what to do; empty where all is well."""

    what: str
    seen: str
    advice: str = ""
    is_fatal: bool = False
    """A run would not start, or not work."""


def look_at_machine(config: RunConfig) -> Iterator[Finding]:
    """Everything that needs no other machine."""
    yield Finding("zeroband", zeroband.__version__)
    yield Finding("Python, system", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield from _packages()
    yield _native_library(config)
    yield _sealing(config)
    yield _shared_memory(config)
    yield from _tcp()


def _packages() -> Iterator[Finding]:
    for name in ("torch", "triton", "redis"):
        try:
            yield Finding(name, version(name))
        except PackageNotFoundError:
            yield Finding(name, "not installed")


def _needs_native(config: RunConfig) -> bool:
    return config.outer is not None and config.comm.backend == "native"


def _native_library(config: RunConfig) -> Finding:
    problem = native.problem()
    if problem is not None:
        return Finding("native library", "missing", problem, is_fatal=_needs_native(config))
    return Finding("native library", f"codecs for {', '.join(native.variants())}")


def _sealing(config: RunConfig) -> Finding:
    if not _needs_native(config):
        return Finding("encryption", "not applicable: nothing is averaged on the native data path")
    reason = None if native.problem() else native.load().zb_sealing_problem()
    if reason is None:
        return Finding("encryption", "AES-256-GCM of libcrypto" if config.comm.encryption else "off, as configured")
    advice = "install OpenSSL (libssl3), or set comm.encryption = false where you trust every network between the nodes"
    return Finding("encryption", reason.decode(), advice, is_fatal=config.comm.encryption)


def _shared_memory(config: RunConfig) -> Finding:
    folder, what = config.node.shm_dir, "shared memory"
    if not folder.is_dir():
        return Finding(what, f"{folder} is no folder", "set node.shm_dir to a memory file system", is_fatal=True)
    free = shutil.disk_usage(folder).free
    try:
        values = parameter_count(config.model, open_tokenizer(config.data.tokenizer).padded_vocab_size)
    except (ConfigError, OSError) as error:
        return Finding(what, f"{_size(free)} free in {folder}", f"the tokenizer cannot be opened: {error}")
    try:
        needed = 4 * _buffers(config) * values
    except ConfigError as error:
        return Finding("outer algorithm", "cannot be had", str(error), is_fatal=True)
    seen = f"{_size(free)} free in {folder}, this model needs {_size(needed)}"
    if free >= needed:
        return Finding(what, seen)
    return Finding(
        what, seen, "raise it (docker: --shm-size; else remount with size=), or set node.shm_dir", is_fatal=True
    )


def _buffers(config: RunConfig) -> int:
    """How many float32 values a node holds in shared memory for each parameter, but for encoded ones and payloads."""
    match config.outer:
        case None:
            held, work, inner = 0, 0, 3  # parameters and two moments, in checkpoints only
        case DdpConfig():
            held, work, inner = 3, 2, 0  # the moments are held already
        case DemoConfig():
            held, work, inner = 2, 1, 0  # parameters and momentum; steps by signs have no moments
        case SparseLocoConfig():
            held, work, inner = 2, 2, 2  # parameters and errors
        case CustomConfig() as outer:
            held, work, inner = len(load_algorithm(outer).sections), 2 + codec_of(config).needs_feedback, 2
        case DilocoConfig(merge=merge):
            held, work, inner = 2, 2 + 2 * (merge == "eager") + codec_of(config).needs_feedback, 2
    return held + work + (0 if config.ckpt.path is None else held + inner)


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
        yield Finding(f"largest {name}", _size(largest), advice)


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


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"
