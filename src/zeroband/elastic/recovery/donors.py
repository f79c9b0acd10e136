"""A joiner's view of donors: addresses, connections and manifest requests. All lengths are bounded, not trusted."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from zeroband.elastic.membership.reach import DialRoute, DialRoutes
from zeroband.elastic.recovery.state_chunks import StateManifest, parse_manifest
from zeroband.elastic.transport.dial import Dialler
from zeroband.elastic.transport.sealed import Connection
from zeroband.errors import HandshakeFailed, RecoveryFailed
from zeroband.node.backoff import Backoff
from zeroband.observe.log import get_logger

MANIFEST_BYTES = 16 << 20
"""Largest accepted manifest; most of it is the round's record."""

_PIECE_BYTES = 1 << 18
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

_log = get_logger(__name__)

DONOR_ERRORS = (OSError, http.client.HTTPException, ValueError, HandshakeFailed)
"""Errors of a donor that is disconnected, silent, not of this run, or sends invalid data."""


@dataclass(frozen=True)
class Donor:
    """A member that serves its state."""

    member_id: str
    host: str
    port: int
    relays: DialRoutes = ()
    """Routes through relays, if it cannot be dialled."""

    @property
    def routes(self) -> DialRoutes:
        """Its routes in order of preference: relays first, as it has them only if it cannot be dialled."""
        return *self.relays, DialRoute(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.member_id} at {self.host}:{self.port}"


@dataclass(frozen=True)
class FetchLimits:
    """Parallelism and time-outs of a fetch."""

    donors_at_once: int = 3
    connections: int = 3
    """Connections per donor: one TCP stream does not fill a long link."""
    straggler_s: float = 1.0
    """A chunk in flight for longer than this, and than twice the median, is also requested from another donor."""
    connect_s: float = 5.0
    silent_s: float = 30.0
    """Longest silence within an answer; above the time that a donor waits for a round that it is about to apply."""
    answer_s: float = 300.0
    """Longest time for a complete answer."""
    hashing_s: float = 300.0
    """Longest time for a donor to hash a stretch."""
    retries: int = 3
    """Consecutive failed requests per connection."""
    backoff_s: float = 0.2
    """Pause before the first retry; it doubles with each."""


LIMITS = FetchLimits()


class DonorConnection:
    """A connection to a donor that is reopened when it breaks. For one thread; any thread may `abort()` it."""

    def __init__(self, donor: Donor, dialler: Dialler, limits: FetchLimits) -> None:
        self._donor = donor
        self._dialler = dialler
        self._connection: Any = http.client.HTTPConnection(donor.host, donor.port)
        self._connection.auto_open = 0  # http.client must not connect without the handshake
        self._limits = limits
        self._is_aborted = False

    def get(self, path: str, most_bytes: int) -> tuple[int, bytes]:
        """Return status and body of an answer. Raises RecoveryFailed for a longer body, or one of DONOR_ERRORS."""
        with self._request(path) as response:
            length = response.length
            if length is None or length > most_bytes:
                raise RecoveryFailed(f"{path} has {_count(length)} bytes, at most {most_bytes} are taken")
            return response.status, b"".join(_pieces(response, length))

    def read_into(self, path: str, target: memoryview) -> int:
        """Read an answer into a buffer, which stays untouched unless the returned status is 200.

        Raises RecoveryFailed for a body of another length, or one of DONOR_ERRORS.
        """
        with self._request(path) as response:
            length = response.length
            if response.status == HTTPStatus.OK and length != len(target):
                raise RecoveryFailed(f"{path} has {_count(length)} bytes, not {len(target)}")
            if response.status != HTTPStatus.OK:
                self.close()
                return response.status
            done = 0
            for piece in _pieces(response, len(target)):
                target[done : done + len(piece)] = piece
                done += len(piece)
            return HTTPStatus.OK

    @contextlib.contextmanager
    def _request(self, path: str) -> Generator[http.client.HTTPResponse]:
        """Send a request with a deadline for the complete answer; any error closes the connection."""
        deadline = threading.Timer(self._limits.answer_s, self._cut)
        deadline.daemon = True
        deadline.start()
        try:
            self._open()
            self._connection.request("GET", path)
            response: http.client.HTTPResponse = self._connection.getresponse()
            yield response
            response.close()
        except BaseException:
            self.close()
            raise
        finally:
            deadline.cancel()

    def _open(self) -> None:
        if self._socket is None:
            donor = self._donor
            opened = self._dialler.dial(donor.member_id, donor.routes, self._limits.connect_s)
            opened.settimeout(self._limits.silent_s)
            self._connection.sock = opened
        if self._is_aborted:
            raise ConnectionAbortedError("this joiner no longer needs the donor")

    @property
    def _socket(self) -> Connection | None:
        return self._connection.sock

    def _cut(self) -> None:
        opened = self._socket
        if opened is not None:
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)

    def abort(self) -> None:
        """Interrupt the connection's thread, and refuse further requests."""
        self._is_aborted = True
        self._cut()

    def close(self) -> None:
        """Close the socket; the next request opens a new one."""
        self._connection.close()


@dataclass(frozen=True)
class Inquiry:
    """Requests of a joiner to its donors."""

    kind: str
    """`state`, `journal` or `offer`."""
    dialler: Dialler
    lengths: Mapping[str, int] | None
    """Expected bytes of each section; None: any."""
    limits: FetchLimits = LIMITS

    def path(self, round: int) -> str:
        return f"/{self.kind}/{round}"

    def none_at(self, round: int, first: int) -> str:
        """Describe that a donor has no manifest of a round from this chunk on."""
        return f"{self.path(round)}/{first} answered {HTTPStatus.NOT_FOUND}"

    def connect(self, donor: Donor) -> DonorConnection:
        """Make a connection, dialled on the first request."""
        return DonorConnection(donor, self.dialler, self.limits)

    def lead_of(
        self,
        donors: Sequence[Donor],
        round: int | None,
        first_of: Callable[[int], int] = lambda round: 0,
        objection: Callable[[StateManifest], str] = lambda manifest: "",
    ) -> tuple[Donor, StateManifest]:
        """Return the first donor that serves this round (None: its newest), and its manifest.

        `first_of`: returns the first needed chunk of a round. `objection`: returns why a claim is not credible; empty:
        it is. Raises RecoveryFailed with every donor's problem.
        """
        problems: dict[str, str] = {}
        for donor in donors:
            try:
                with contextlib.closing(self.connect(donor)) as connection:
                    asked = self._newest_round(connection) if round is None else round
                    manifest = self.manifest_of(connection, asked, first_of(asked))
            except (*DONOR_ERRORS, RecoveryFailed) as error:
                problems[str(donor)] = reason_of(error)
                continue
            why = self.none_at(asked, first_of(asked)) if manifest is None else objection(manifest)
            if manifest is not None and not why:
                return donor, manifest
            problems[str(donor)] = why
            _log.debug("donor passed over", extra={"fields": {"donor": str(donor), "round": asked, "why": why}})
        raise no_donor(problems)

    def _newest_round(self, connection: DonorConnection) -> int:
        """Return the round of a donor's newest state. Raises RecoveryFailed, or one of DONOR_ERRORS."""
        status, body = connection.get(f"/{self.kind}", MANIFEST_BYTES)
        if status != HTTPStatus.OK:
            raise RecoveryFailed(f"/{self.kind} answered {status}")
        try:
            round = json.loads(body)["round"]
        except (LookupError, TypeError, RecursionError) as error:
            raise RecoveryFailed(f"it answers nonsense: {error!r:.200}") from error
        if type(round) is not int:
            raise RecoveryFailed("its round is no number")
        return round

    def manifest_of(self, connection: DonorConnection, round: int, first: int) -> StateManifest | None:
        """Return a donor's manifest of a round with hashes from chunk `first`, waiting until they are computed.

        None: the donor does not hold this round. Raises RecoveryFailed, or one of DONOR_ERRORS.
        """
        path = f"{self.path(round)}/{first}"
        status, body = self._await_manifest(connection, path)
        if status == HTTPStatus.NOT_FOUND:
            return None
        if status != HTTPStatus.OK:
            raise RecoveryFailed(f"{path} answered {status}")
        manifest = parse_manifest(body, self.lengths)
        if manifest.round != round:
            raise RecoveryFailed(f"it answers with round {manifest.round} where round {round} was asked for")
        if manifest.first != first:
            raise RecoveryFailed(f"it lists chunks from {manifest.first} where those from {first} were asked for")
        return manifest

    def _await_manifest(self, connection: DonorConnection, path: str) -> tuple[int, bytes]:
        deadline_s, pauses = time.monotonic() + self.limits.hashing_s, Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        while True:
            status, body = connection.get(path, MANIFEST_BYTES)
            if status != HTTPStatus.ACCEPTED:
                return status, body
            if time.monotonic() > deadline_s:
                raise RecoveryFailed(f"it hashes its state for more than {self.limits.hashing_s:g} s")
            time.sleep(pauses.pause_s())


def no_donor(problems: Mapping[str, str]) -> RecoveryFailed:
    """Return an error that lists every donor's problem."""
    named = "; ".join(f"{donor}: {why}" for donor, why in problems.items())
    return RecoveryFailed("no member could serve its state: " + (named or "no member is alive"))


def _pieces(response: http.client.HTTPResponse, length: int) -> Iterator[bytes]:
    """Yield the body as it arrives. Raises IncompleteRead if it ends early."""
    while length > 0:
        piece = response.read1(min(_PIECE_BYTES, length))
        if not piece:
            raise http.client.IncompleteRead(b"", length)
        length -= len(piece)
        yield piece


def _count(length: int | None) -> str:
    return "an unknown number of" if length is None else str(length)


def reason_of(error: BaseException) -> str:
    """Format an error briefly; text from a donor is truncated."""
    return str(error) if isinstance(error, OSError | RecoveryFailed | HandshakeFailed) else f"{error!r:.200}"
