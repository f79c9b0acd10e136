"""The engine in Python's hands: links made of streams, and operations that go on without the interpreter."""

from __future__ import annotations

import ctypes
import enum
import socket
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
    """How far an operation is. All but RUNNING are for good."""

    RUNNING = 0
    DONE = 1
    ABORTED = 2
    NOT_FINITE = 3
    """A value has no encoding; the detail is its index."""
    FOREIGN_FRAME = 4
    """A member sent something twice; the detail is the member."""
    PEER_LOST = 5
    """The link to a member broke; the detail is the member."""
    OUT_OF_RANGE = 6
    """A member sent a value that is not finite, or larger than the members announced; the detail is the member."""


@dataclass(frozen=True)
class Operation:
    """Which operation of which run it is. Plans are numbered upwards; nothing older than the newest counts."""

    run: int
    """64 bits that stand for the run's id."""
    plan: int
    """Number of the plan; its last 16 bits tell plans apart that have the same one."""
    epoch: int
    round: int
    lane: int = 0


@dataclass(frozen=True)
class Encoded:
    """What goes into a reduction and what comes out of it, as the codec encodes it. (encoded_size(n),) uint8 on CPU."""

    contribution: Tensor
    """Its maker has checked that all values are finite."""
    result: Tensor


@dataclass(frozen=True)
class Traffic:
    """What moved between this node and one member, and for how long. Bytes of payload."""

    sent_bytes: int
    to_send_bytes: int
    received_bytes: int
    to_receive_bytes: int
    missing_part_bytes: int
    """Part of what is still to be received that the member has had from the start: its own contribution or payload."""
    sending_s: float
    silent_s: float | None
    """Seconds since something came last; None where nothing has come."""

    @property
    def is_over(self) -> bool:
        """Whether all that the two have for one another was exchanged."""
        return self.sent_bytes == self.to_send_bytes and self.received_bytes == self.to_receive_bytes


@dataclass(frozen=True)
class LinkState:
    """A link as it is now."""

    is_up: bool
    streams: int
    rtt_s: float
    unanswered_s: float
    """Seconds since the last packet came over a stream on which TCP waits for an answer to what it sent; the worst
    stream counts. 0 where none waits. It stays small for a machine that is reached, however busy its processes are."""
    received_bytes: int
    """Bytes of frames that were taken, as they come; frames that only show that the other end is there do not count."""
    window: int = 0
    """Packets that one of its streams may have under way, the mean of those that have any; 0: none has."""
    sent_packets: int = 0
    """Packets of data since the link's streams were made; those that were sent again count, too."""
    resent_packets: int = 0
    silent_s: float = 0.0
    """Seconds for which nothing came over the stream that was heard last; this process's own stalls and streams on
    which it holds a frame back do not count. Its other end shows itself several times in what is called silent,
    whatever its interpreter does."""
    stalest_s: float = 0.0
    """Seconds for which nothing came over the stream that was not heard for longest, counted like `silent_s`."""


class Engine:
    """A few threads that move frames. Any thread may call it; `close()` ends its threads and connections.

    `beat_s`: after so long without anything else to send, a stream shows its other end that this one is there.
    What is native lives as long as this object and its operations, so that no call ever meets freed memory.
    Raises OSError where the native library is missing.
    """

    def __init__(self, threads: int, *, beat_s: float = 1.0) -> None:
        self._library = native.load()
        handle = self._library.zb_engine_open(threads, beat_s)
        if not handle:
            raise ValueError(f"no engine with {threads} threads and beat_s={beat_s}: {native.last_problem()}")
        self._handle: int = handle
        weakref.finalize(self, self._library.zb_engine_free, self._handle).atexit = False  # threads may be in it then

    def add_stream(self, link: int, connection: socket.socket, keys: StreamKeys) -> None:
        """Make a connected socket one of the link's streams, and the engine's own.

        A closed engine hangs up, and so does a link that was lost.
        """
        self._library.zb_stream_add(self._handle, link, connection.detach(), keys.seal, keys.open)

    def drop(self, link: int) -> None:
        """Close all connections of a link."""
        self._library.zb_link_drop(self._handle, link)

    def state(self, link: int) -> LinkState:
        """A link that never had a stream is down."""
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
        """Have this congestion control of TCP on all streams of a link, where the machine has and allows it."""
        self._library.zb_link_congestion(self._handle, link, name.encode())

    def set_pace(self, link: int, bytes_per_s: int) -> None:
        """The most that each stream of a link sends, evenly spaced, where the machine can; 0: what TCP finds."""
        self._library.zb_link_pace(self._handle, link, bytes_per_s)

    def set_senders(self, link: int, senders: int) -> None:
        """Send over the first `senders` of a link's streams; all of them receive."""
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

        Shapes: all (n,) float32 on CPU, contiguous; they must stay as they are until the reduction ended. `self_at`:
        this node's place among the members. `links`: of each member; its own is not used. `allowed`: share of this
        node's frames to send before `Running.allow` says more. `errors`: gets what this node's encodings took from
        the mean, in units of `source`: the mean misses its share of them. Not written to where its share is 0.
        `encoded`: the contribution in place of `source`, which is not read then; `errors` leaves out what its encoding
        took. `encoded_mean`, and the result of `encoded`: get what `result` was decoded from. `robust`: how this node
        combines what comes for its shard, the same on all members; then `errors` leaves out what the encoding of the
        result took. All-to-all, without sites. `hashes`: get those of the parts that come for this node's shard.
        """
        buffers = (source, result) if errors is None else (source, result, errors)
        _require_values(buffers, shape.bounds[-1])
        contribution, mean = _encodings_of(encoded, encoded_mean, shape)
        buffers = (*buffers, *(each for each in (contribution, mean) if each is not None))
        buffers = buffers if robust is None else (*buffers, robust.measured.values)
        buffers = buffers if hashes is None else (*buffers, hashes.key.words, hashes.values)
        *arrays, sizes = _arrays_of(shape, links)
        spec = native.ReduceSpec(
            operation.run,
            operation.plan,
            operation.epoch,
            operation.round,
            operation.lane,
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
        """Begin to send `payload` on its route and to take, and pass on, what comes.

        Shapes: payload (lengths[self_at],), result (sum(lengths),) uint8 on CPU, contiguous: the payloads in the order
        of the members, of any length and untouched on a member that does not receive; both stay as they are until it
        ended. `lengths`: of all members, the same on all of them; one of no bytes is not sent. `links`, `allowed`: as
        for `start`.
        """
        total = sum(lengths) if any(source is not None for source in route.sources) else result.numel()
        for tensor, length in ((payload, lengths[self_at]), (result, total)):
            if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.numel() != length:
                raise ValueError(f"a gathering needs {length} contiguous bytes, not {tensor.shape} {tensor.dtype}")
        sources = [_NOBODY if source is None else source for source in route.sources]
        arrays = (
            np.array(lengths, np.uint64),
            *(np.array(places, np.uint32) for places in (links, sources)),
            *(_marks(places, len(lengths)) for places in (route.receivers, route.near)),
        )
        spec = native.GatherSpec(
            operation.run,
            operation.plan,
            operation.epoch,
            operation.round,
            operation.lane,
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
        """The most memory that frames in transit took so far."""
        return int(self._library.zb_peak_bytes(self._handle))

    def forget_peak(self) -> None:
        self._library.zb_forget_peak(self._handle)

    def end(self, operation: int) -> None:
        """Stop an operation, by its handle, where it still runs; on return it touches no buffer any more."""
        self._library.zb_transfer_end(self._handle, operation)

    def allow(self, operation: int, share: float) -> None:
        """Let this share of an operation's frames be sent."""
        self._library.zb_transfer_allow(self._handle, operation, share)

    def close(self) -> None:
        """End all threads, connections and operations. From then on every link is down."""
        self._library.zb_engine_close(self._handle)


_NOBODY = 0xFFFFFFFF


def _marks(places: Iterable[int], world: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """1 for each of these places."""
    marks = np.zeros(world, np.uint8)
    marks[list(places)] = 1
    return marks


def _arrays_of(shape: Shape, links: Sequence[int]) -> Sequence[np.ndarray[Any, Any]]:
    """The lists of a shape as the library reads them: bounds, shares, order, links, chain, largest."""
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
    """The contribution as it comes encoded, and where the mean goes. Raises ValueError where a size is another one."""
    found = (None, encoded_mean) if encoded is None else (encoded.contribution, encoded.result)
    needed = shape.codec.encoded_size(shape.bounds[-1])
    for tensor in (each for each in found if each is not None):
        if tensor.dtype != torch.uint8 or not tensor.is_contiguous() or tensor.numel() != needed:
            raise ValueError(
                f"{shape.bounds[-1]} values take {needed} contiguous bytes in {shape.codec.name}, not {tensor.shape}"
            )
    return found


class Running:
    """An operation that runs, or ended, and can be asked after for as long as somebody holds it.

    `close()` stops it and gives its buffers back. One that is no longer referenced is stopped before they can be freed.
    """

    def __init__(self, engine: Engine, handle: int, buffers: tuple[Tensor, ...]) -> None:
        self._library = native.load()
        self._engine = engine
        self._handle = handle
        weakref.finalize(self, _end_and_free, engine, handle, buffers).atexit = False

    def wait(self, timeout_s: float) -> State:
        """Wait for its end, but not longer; 0 only looks."""
        return State(self._library.zb_transfer_wait(self._handle, timeout_s))

    def allow(self, share: float) -> None:
        """Let this share of the node's frames be sent."""
        self._engine.allow(self._handle, share)

    def is_held(self) -> bool:
        """Whether all frames that may be sent are with the kernel."""
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
        """Stop it where it still runs, from any thread; on return no buffer is touched any more."""
        self._engine.end(self._handle)


def _end_and_free(engine: Engine, handle: int, _buffers: tuple[Tensor, ...]) -> None:
    engine.end(handle)
    native.load().zb_transfer_free(handle)
