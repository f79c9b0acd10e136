"""Python bindings of the C++ engine: links of several streams, and operations that run without the interpreter."""

from __future__ import annotations

import ctypes
import enum
import socket
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zeroband.elastic.transport.handshake import StreamKeys
from zeroband.elastic.transport.shape import Route, Shape
from zeroband.kernels import native
from zeroband.kernels.keyed_hash import PartHashes
from zeroband.kernels.robust import Robustly


class State(enum.IntEnum):
    """State of an operation. All but RUNNING are final."""

    RUNNING = 0
    DONE = 1
    ABORTED = 2
    NOT_FINITE = 3
    """A value cannot be encoded; the detail is its index."""
    FOREIGN_FRAME = 4
    """A member sent a frame twice; the detail is the member."""
    PEER_LOST = 5
    """The link to a member broke; the detail is the member."""
    OUT_OF_RANGE = 6
    """A member sent a value that is not finite, or larger than the members announced; the detail is the member."""


@dataclass(frozen=True)
class Operation:
    """Identifies an operation. Plan numbers grow; frames of older operations are discarded."""

    run: int
    """64-bit hash of the run id."""
    plan: int
    """Number of the plan; its low 16 bits tell plans of equal version apart."""
    epoch: int
    round: int
    lane: int = 0


@dataclass(frozen=True)
class Encoded:
    """Input and output of a reduction in encoded form, (encoded_size(n),) uint8 on CPU each."""

    contribution: Tensor
    """The caller has checked that all values are finite."""
    result: Tensor


@dataclass(frozen=True)
class Traffic:
    """Payload bytes exchanged with one member, and timing."""

    sent_bytes: int
    to_send_bytes: int
    received_bytes: int
    to_receive_bytes: int
    missing_part_bytes: int
    """Missing bytes of the member's own contribution or payload, which it could send from the start."""
    sending_s: float
    silent_s: float | None
    """Seconds since the last receipt; None: nothing received yet."""

    @property
    def is_over(self) -> bool:
        """Whether the exchange with this member is complete."""
        return self.sent_bytes == self.to_send_bytes and self.received_bytes == self.to_receive_bytes


@dataclass(frozen=True)
class LinkState:
    """Current state of a link."""

    is_up: bool
    streams: int
    rtt_s: float
    unanswered_s: float
    """Seconds since the last packet on a stream with unacknowledged data, of the worst stream; 0: none waits. It stays
    small for any reachable machine, however busy its processes are, since kernels acknowledge."""
    received_bytes: int
    """Received bytes of accepted frames, without beats."""
    window: int = 0
    """Mean congestion window of its sending streams, in packets; 0: none is sending."""
    sent_packets: int = 0
    """Data packets sent since the link's streams were opened, including retransmissions."""
    resent_packets: int = 0
    silent_s: float = 0.0
    """Silence of its most recently heard stream, in seconds. This process's own stalls, and streams on which it holds
    back a frame, do not count. The other end's engine sends several beats within a stall limit, whatever its
    interpreter does."""
    stalest_s: float = 0.0
    """Silence of its longest-silent stream, counted like `silent_s`."""


class Engine:
    """A few C++ threads that move frames. Thread-safe; `close()` ends its threads and connections.

    `beat_s`: idle time after which a stream sends a beat. Native objects live as long as this object and its
    operations, so no call meets freed memory. Raises OSError if the native library is missing.
    """

    def __init__(self, threads: int, *, beat_s: float = 1.0) -> None:
        self._library = native.load()
        handle = self._library.zb_engine_open(threads, beat_s)
        if not handle:
            raise ValueError(f"no engine with {threads} threads and beat_s={beat_s}: {native.last_problem()}")
        self._handle: int = handle
        weakref.finalize(
            self, self._library.zb_engine_free, self._handle
        ).atexit = False  # at exit threads may still be inside

    def add_stream(self, link: int, connection: socket.socket, keys: StreamKeys) -> None:
        """Add a connected socket to a link's streams; the engine takes ownership.

        A closed engine, or a lost link, closes it.
        """
        self._library.zb_stream_add(self._handle, link, connection.detach(), keys.seal, keys.open)

    def drop(self, link: int) -> None:
        """Close all connections of a link."""
        self._library.zb_link_drop(self._handle, link)

    def state(self, link: int) -> LinkState:
        """Return a link's state; a link that never had a stream is down."""
        record = native.LinkRecord()
        self._library.zb_link_state(self._handle, link, ctypes.byref(record))
        rtt_s, unanswered_s = record.rtt_us / 1e6, record.unanswered_ms / 1e3
        return LinkState(
            bool(record.is_up),
            record.streams,
            rtt_s,
            unanswered_s,
            record.received_bytes,
            record.window,
            record.sent_packets,
            record.resent_packets,
            record.silent_ms / 1e3,
            record.stalest_ms / 1e3,
        )

    def set_congestion(self, link: int, name: str) -> None:
        """Set the TCP congestion control of a link's streams, if the kernel has and permits it."""
        self._library.zb_link_congestion(self._handle, link, name.encode())

    def set_pace(self, link: int, bytes_per_s: int) -> None:
        """Limit each stream of a link to a pacing rate, if the kernel supports it; 0: no limit."""
        self._library.zb_link_pace(self._handle, link, bytes_per_s)

    def set_senders(self, link: int, senders: int) -> None:
        """Send only over the first `senders` of a link's streams; all of them receive."""
        self._library.zb_link_senders(self._handle, link, senders)

    def start(
        self,
        operation: Operation,
        shape: Shape,
        self_at: int,
        links: Sequence[int],
        source: Tensor,
        result: Tensor,
        *,
        allowed: float = 1.0,
        errors: Tensor | None = None,
        encoded: Encoded | None = None,
        encoded_mean: Tensor | None = None,
        robust: Robustly | None = None,
        hashes: PartHashes | None = None,
    ) -> Running:
        """Begin the weighted mean of all members' `source`, into `result`.

        Shapes: all (n,) float32 on CPU, contiguous; unchanged until the reduction ends. `self_at`: this node's place.
        `links`: of each member; its own is unused. `allowed`: fraction of this node's frames to send until
        `Running.allow`. `errors`: receives the encoding error of this node's data in units of `source`, unless its
        share is 0: the mean lacks its share of it. `encoded`: replaces `source`, which is not read; `errors` then
        excludes its encoding error. `encoded_mean`, and the result of `encoded`: receive the bytes that the result was
        decoded from. `robust`: how to combine the contributions to this node's shard, equal on all members, all-to-all
        without sites; `errors` then excludes the result's encoding error. `hashes`: receive hashes of the parts for
        this node's shard.
        """
        buffers = (source, result) if errors is None else (source, result, errors)
        _require_values(buffers, shape.bounds[-1])
        contribution, mean = _encodings_of(encoded, encoded_mean, shape)
        buffers = (*buffers, *(each for each in (contribution, mean) if each is not None))
        buffers = buffers if robust is None else (*buffers, robust.measured.values)
        buffers = buffers if hashes is None else (*buffers, hashes.key.words, hashes.values)
        *arrays, sizes = _arrays_of(shape, links)
        spec = native.ReduceSpec(
            *astuple(operation),
            shape.codec.number,
            shape.is_ring,
            len(shape.shares),
            len(shape.order),
            self_at,
            shape.chunk_numel,
            *(array.ctypes.data for array in arrays),
            source.data_ptr(),
            result.data_ptr(),
            None if errors is None else errors.data_ptr(),
            None if contribution is None else contribution.data_ptr(),
            None if mean is None else mean.data_ptr(),
            allowed,
            sizes.ctypes.data if shape.largest else None,
            *((0, 0, 0.0, None) if robust is None else robust.as_fields()),
            *((None, None) if hashes is None else (hashes.key.words.data_ptr(), hashes.values.data_ptr())),
        )
        handle = self._library.zb_reduce_start(self._handle, ctypes.byref(spec))
        if not handle:
            raise ValueError(f"no reduction has this shape: {native.last_problem()}: {shape}")
        return Running(self, handle, buffers)

    def gather(
        self,
        operation: Operation,
        lengths: Sequence[int],
        self_at: int,
        links: Sequence[int],
        route: Route,
        payload: Tensor,
        result: Tensor,
        *,
        chunk_bytes: int,
        allowed: float = 1.0,
    ) -> Running:
        """Begin to send `payload` along its route, and to receive and relay the others'.

        Shapes: payload (lengths[self_at],), result (sum(lengths),) uint8 on CPU, contiguous, with the payloads in
        member order; on a member that does not receive, result has any length and stays untouched. Both stay unchanged
        until the end. `lengths`: of all members' payloads, equal on all of them; 0: not sent. `links`, `allowed`: as
        for `start`.
        """
        total = sum(lengths) if any(source is not None for source in route.sources) else result.numel()
        for tensor, length in ((payload, lengths[self_at]), (result, total)):
            if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.numel() != length:
                raise ValueError(f"a gathering needs {length} contiguous bytes, not {tensor.shape} {tensor.dtype}")
        sources = [_NO_SOURCE if source is None else source for source in route.sources]
        arrays = (
            np.array(lengths, np.uint64),
            *(np.array(places, np.uint32) for places in (links, sources)),
            *(_mask(places, len(lengths)) for places in (route.receivers, route.near)),
        )
        spec = native.GatherSpec(
            *astuple(operation),
            len(lengths),
            self_at,
            chunk_bytes,
            *(array.ctypes.data for array in arrays),
            payload.data_ptr(),
            result.data_ptr(),
            allowed,
        )
        handle = self._library.zb_gather_start(self._handle, ctypes.byref(spec))
        if not handle:
            shown = f"{lengths} bytes in pieces of {chunk_bytes}"
            raise ValueError(f"no gathering of {shown} on this route: {native.last_problem()}: {route}")
        return Running(self, handle, (payload, result))

    @property
    def peak_bytes(self) -> int:
        """Peak memory of frames in transit."""
        return int(self._library.zb_peak_bytes(self._handle))

    def forget_peak(self) -> None:
        self._library.zb_forget_peak(self._handle)

    def end(self, operation: int) -> None:
        """Stop an operation by its handle; on return it no longer touches any buffer."""
        self._library.zb_transfer_end(self._handle, operation)

    def allow(self, operation: int, share: float) -> None:
        """Allow this fraction of an operation's frames to be sent."""
        self._library.zb_transfer_allow(self._handle, operation, share)

    def close(self) -> None:
        """End all threads, connections and operations; afterwards every link is down."""
        self._library.zb_engine_close(self._handle)


_NO_SOURCE = 0xFFFFFFFF


def _mask(places: Iterable[int], world: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return a byte mask with 1 at these places."""
    marks = np.zeros(world, np.uint8)
    marks[list(places)] = 1
    return marks


def _arrays_of(shape: Shape, links: Sequence[int]) -> Sequence[np.ndarray[Any, Any]]:
    """Convert a shape for the library: bounds, shares, order, links, chain, largest."""
    return (
        np.array(shape.bounds, np.uint64),
        np.array(shape.shares, np.float32),
        *(np.array(places, np.uint32) for places in (shape.order, links, shape.chain)),
        np.minimum(np.array(shape.largest, np.float64), np.finfo(np.float32).max).astype(np.float32),
    )


def _require_values(buffers: Iterable[Tensor], numel: int) -> None:
    for tensor in buffers:
        if tensor.dtype != torch.float32 or not tensor.is_contiguous() or tensor.numel() != numel:
            raise ValueError(f"a reduction needs {numel} contiguous float32 values, not {tensor.shape}")


def _encodings_of(
    encoded: Encoded | None, encoded_mean: Tensor | None, shape: Shape
) -> tuple[Tensor | None, Tensor | None]:
    """Return the encoded contribution and the buffer of the encoded mean. Raises ValueError for a wrong size."""
    found = (None, encoded_mean) if encoded is None else (encoded.contribution, encoded.result)
    needed = shape.codec.encoded_size(shape.bounds[-1])
    for tensor in (each for each in found if each is not None):
        if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.numel() != needed:
            raise ValueError(
                f"{shape.bounds[-1]} values take {needed} contiguous bytes in {shape.codec.name}, not {tensor.shape}"
            )
    return found


class Running:
    """A handle of a running or finished operation.

    `close()` stops it and releases its buffers. An unreferenced one is stopped before its buffers are freed.
    """

    def __init__(self, engine: Engine, handle: int, buffers: tuple[Tensor, ...]) -> None:
        self._library = native.load()
        self._engine = engine
        self._handle = handle
        weakref.finalize(self, _end_and_free, engine, handle, buffers).atexit = False

    def wait(self, timeout_s: float) -> State:
        """Wait for the end, at most this long; 0 polls."""
        return State(self._library.zb_transfer_wait(self._handle, timeout_s))

    def allow(self, share: float) -> None:
        """Allow this fraction of the node's frames to be sent."""
        self._engine.allow(self._handle, share)

    def is_held(self) -> bool:
        """Whether all allowed frames have been passed to the kernel."""
        return bool(self._library.zb_transfer_is_held(self._handle))

    @property
    def detail(self) -> int:
        return int(self._library.zb_transfer_detail(self._handle))

    def traffic(self, member: int) -> Traffic:
        record = native.TrafficRecord()
        native.require_done(self._library.zb_transfer_traffic(self._handle, member, ctypes.byref(record)))
        return Traffic(
            record.sent_bytes,
            record.to_send_bytes,
            record.received_bytes,
            record.to_receive_bytes,
            record.missing_part_bytes,
            record.sending_s,
            record.silent_s if record.silent_s >= 0 else None,
        )

    def close(self) -> None:
        """Stop it, from any thread; on return no buffer is touched any more."""
        self._engine.end(self._handle)


def _end_and_free(engine: Engine, handle: int, _buffers: tuple[Tensor, ...]) -> None:
    engine.end(handle)
    native.load().zb_transfer_free(handle)
