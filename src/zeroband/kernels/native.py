"""Loads the native library and types its functions. The GIL is released while they run."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from functools import cache
from pathlib import Path

from zeroband.errors import way_to_native_library

ABI = 17
"""Required result of `zb_abi`; a library built from other sources is rejected."""


class ReduceSpec(ctypes.Structure):
    """Argument of `zb_reduce_start`.

    `input`, `output` and the pointers after them must stay valid until the reduction ends; the others are read during
    the call. `errors`, both encodings, `largest`, `measured` with rule 0, and the last two may be null.
    """

    _fields_ = (
        ("run", c_uint64),
        ("plan", c_uint64),
        ("epoch", c_uint32),
        ("round", c_uint32),
        ("lane", c_uint32),
        ("codec", c_int32),
        ("is_ring", c_int32),
        ("world", c_uint32),
        ("speakers", c_uint32),
        ("self", c_uint32),
        ("chunk_numel", c_uint64),
        ("bounds", c_void_p),
        ("shares", c_void_p),
        ("order", c_void_p),
        ("links", c_void_p),
        ("chain", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("errors", c_void_p),
        ("encoded", c_void_p),
        ("encoded_result", c_void_p),
        ("allowed", c_double),
        ("largest", c_void_p),
        ("rule", c_int32),
        ("iterations", c_uint32),
        ("trim", c_double),
        ("measured", c_void_p),
        ("hash_key", c_void_p),
        ("hashes", c_void_p),
    )


class GatherSpec(ctypes.Structure):
    """Argument of `zb_gather_start`.

    `input` and `output` must stay valid until the gather ends; the other pointers are read during the call.
    """

    _fields_ = (
        ("run", c_uint64),
        ("plan", c_uint64),
        ("epoch", c_uint32),
        ("round", c_uint32),
        ("lane", c_uint32),
        ("world", c_uint32),
        ("self", c_uint32),
        ("chunk_bytes", c_uint64),
        ("lengths", c_void_p),
        ("links", c_void_p),
        ("sources", c_void_p),
        ("receivers", c_void_p),
        ("near", c_void_p),
        ("input", c_void_p),
        ("output", c_void_p),
        ("allowed", c_double),
    )


class TrafficRecord(ctypes.Structure):
    """Traffic between this node and another in one operation. `silent_s`: negative before the first byte."""

    _fields_ = (
        ("sent_bytes", c_uint64),
        ("to_send_bytes", c_uint64),
        ("received_bytes", c_uint64),
        ("to_receive_bytes", c_uint64),
        ("missing_part_bytes", c_uint64),
        ("sending_s", c_double),
        ("silent_s", c_double),
    )


class LinkRecord(ctypes.Structure):
    """Current state of a link."""

    _fields_ = (
        ("is_up", c_uint32),
        ("streams", c_uint32),
        ("rtt_us", c_uint32),
        ("unanswered_ms", c_uint32),
        ("window", c_uint32),
        ("silent_ms", c_uint32),
        ("stalest_ms", c_uint32),
        ("received_bytes", c_uint64),
        ("sent_packets", c_uint64),
        ("resent_packets", c_uint64),
    )


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "zb_problem": (c_char_p, ()),
    "zb_variants": (c_int, ()),
    "zb_variant_name": (c_char_p, (c_int,)),
    "zb_encoded_size": (c_int64, (c_int, c_uint64)),
    "zb_encode": (c_int64, (c_int, c_int, c_void_p, c_uint64, c_void_p)),
    "zb_decode": (c_int, (c_int, c_int, c_void_p, c_uint64, c_void_p)),
    "zb_add": (c_int, (c_int, c_int, c_void_p, c_uint64, c_float, c_void_p)),
    "zb_largest": (c_int, (c_int, c_int, c_void_p, c_uint64, POINTER(c_float))),
    "zb_combine": (
        c_int,
        (c_int, c_int, c_int, c_double, c_uint32, c_uint32, c_void_p, c_void_p, c_uint64, c_void_p, c_void_p),
    ),
    "zb_hash": (c_uint64, (c_int, c_void_p, c_uint64, c_void_p)),
    "zb_difference": (c_int, (c_int, c_int, c_void_p, c_void_p, c_uint64, c_void_p, POINTER(c_float))),
    "zb_outer_sgd": (
        c_int,
        (c_int, c_int, c_void_p, c_void_p, c_void_p, c_uint64, c_float, c_float, c_int),
    ),
    "zb_copy": (c_int, (c_int, c_int, c_void_p, c_uint64, c_void_p)),
    "zb_sealing_problem": (c_char_p, ()),
    "zb_engine_open": (c_void_p, (c_int, c_double)),
    "zb_engine_close": (None, (c_void_p,)),
    "zb_engine_free": (None, (c_void_p,)),
    "zb_stream_add": (None, (c_void_p, c_uint32, c_int, c_char_p, c_char_p)),
    "zb_link_drop": (None, (c_void_p, c_uint32)),
    "zb_link_state": (None, (c_void_p, c_uint32, POINTER(LinkRecord))),
    "zb_link_congestion": (None, (c_void_p, c_uint32, c_char_p)),
    "zb_link_pace": (None, (c_void_p, c_uint32, c_uint64)),
    "zb_link_senders": (None, (c_void_p, c_uint32, c_uint32)),
    "zb_peak_bytes": (c_uint64, (c_void_p,)),
    "zb_forget_peak": (None, (c_void_p,)),
    "zb_reduce_start": (c_void_p, (c_void_p, POINTER(ReduceSpec))),
    "zb_gather_start": (c_void_p, (c_void_p, POINTER(GatherSpec))),
    "zb_transfer_wait": (c_int, (c_void_p, c_double)),
    "zb_transfer_allow": (None, (c_void_p, c_void_p, c_double)),
    "zb_transfer_is_held": (c_int, (c_void_p,)),
    "zb_transfer_detail": (c_int64, (c_void_p,)),
    "zb_transfer_traffic": (c_int, (c_void_p, c_uint32, POINTER(TrafficRecord))),
    "zb_transfer_end": (None, (c_void_p, c_void_p)),
    "zb_transfer_free": (None, (c_void_p,)),
}


def require_done(code: int) -> None:
    """Raise ValueError if a function's return code reports an invalid argument."""
    if code != 0:
        raise ValueError(last_problem())


def last_problem() -> str:
    """Return the message of this thread's last failed call."""
    return load().zb_problem().decode(errors="replace")


def library_path() -> Path:
    """Return where the build puts the library."""
    return Path(__file__).with_name("_native.so")


@cache
def load(path: Path | None = None) -> ctypes.CDLL:
    """Load the library. Raises: OSError with the remedy if it is missing or was built from other sources."""
    path = path or library_path()
    if not path.exists():
        raise OSError(f"the native library was not built ({path.name} is missing): {way_to_native_library()}")
    library = ctypes.CDLL(os.fspath(path))
    if library.zb_abi() != ABI:
        raise OSError(
            f"{path.name} has interface {library.zb_abi()}, this version needs {ABI}: {way_to_native_library()}"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def problem() -> str | None:
    """Return why the library cannot be used; None if it can."""
    try:
        load()
    except OSError as error:
        return str(error)
    return None


def variants() -> list[str]:
    """Return the instruction sets that the codecs support here, the best last."""
    return [load().zb_variant_name(i).decode() for i in range(load().zb_variants())]
