"""Retries for failing storage: classifies errors of storage clients, backs off, and logs outages. Any thread."""

from __future__ import annotations

import contextlib
import email.utils
import errno
import random
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

from zeroband.errors import ConfigError, StorageLost
from zeroband.observe.log import get_logger

_FIRST_BACKOFF_S = 0.25
_MAX_BACKOFF_S = 30.0
_DENIED_S = 60.0
"""Time for new credentials to take effect."""
_REMIND_S = 30.0
_QUIET_S = 60.0
"""Shortest time between log lines about two outages."""

_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524}
_TRANSIENT_CODES = {
    *("SlowDown", "RequestTimeout", "RequestTimeoutException", "RequestLimitExceeded", "Throttling", "InternalError"),
    *("ThrottlingException", "TooManyRequestsException", "BandwidthLimitExceeded", "ServiceUnavailable"),
}
_DENIED_CODES = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
    *("AccessDenied", "RequestExpired", "TokenRefreshRequired", "NoCredentialsError", "PartialCredentialsError"),
    *("CredentialRetrievalError", "UnauthorizedSSOTokenError", "RefreshError", "DefaultCredentialsError"),
}
_PERMANENT_ERRNO = {errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP}

_log = get_logger(__name__)

_T = TypeVar("_T")
Kind = Literal["transient", "denied", "missing", "permanent"]


class Damaged(Exception):
    """Wrong file content. Retried once: twice in a row, the file is damaged and not the transfer."""


@dataclass(frozen=True)
class Failure:
    """Classification of a storage client's error."""

    kind: Kind
    status: str
    """HTTP status, service code or error text, for messages."""
    retry_after_s: float | None = None
    """Requested by the server."""


def classify(error: Exception) -> Failure | None:
    """Classify an error; None if no storage client raises it."""
    chain = list(_chain(error))
    if any(type(one).__name__ == "OfflineModeIsEnabled" for one in chain):
        return Failure("permanent", "the Hugging Face Hub is switched off (HF_HUB_OFFLINE)")
    responses = [_response_of(one) for one in chain]
    http_status = next((response.status for response in responses if response.status is not None), None)
    codes = {code for response in responses for code in response.codes}
    text = " ".join(str(one) for one in chain)[:300]
    code = next(iter(sorted(codes & (_TRANSIENT_CODES | _DENIED_CODES))), "")
    status = f"{http_status or code or type(error).__name__}: {text}"
    wait_s = next((response.retry_after_s for response in responses if response.retry_after_s is not None), None)
    if codes & _DENIED_CODES:
        return Failure("denied", status)
    if http_status in _TRANSIENT_STATUS or codes & _TRANSIENT_CODES:
        return Failure("transient", status, wait_s)
    if http_status in (401, 403) or isinstance(error, PermissionError) or text.startswith("Forbidden"):
        return Failure("denied", status)
    if http_status in (404, 410) or (isinstance(error, FileNotFoundError) and not any(map(_is_connection, chain))):
        return Failure("missing", status)
    if http_status is not None and 400 <= http_status < 500:
        return Failure("permanent", status)
    is_foreign = type(error).__module__.partition(".")[0] not in ("builtins", "zeroband")
    if isinstance(error, OSError):
        return Failure("permanent" if error.errno in _PERMANENT_ERRNO else "transient", status, wait_s)
    if isinstance(error, ValueError) and not is_foreign:
        return Failure("permanent", status)  # gcsfs raises it for HTTP 400
    return Failure("transient", status, wait_s) if is_foreign else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_connection(error: BaseException) -> bool:
    """Whether the server was unreachable, which fsspec reports as FileNotFoundError."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # some errors of aiohttp are not OSErrors
    return bool(kinds & {"ClientConnectionError", "ConnectionError", "TimeoutError"})


class _Response(NamedTuple):
    """A server's response as far as an error records it."""

    status: int | None
    codes: set[str]
    """Service codes, and the class name of the error."""
    retry_after_s: float | None


def _response_of(error: BaseException) -> _Response:
    response: Any = getattr(error, "response", None)
    codes = {type(error).__name__}
    if isinstance(response, Mapping):  # botocore
        content = cast("Mapping[str, Any]", response)
        metadata = content.get("ResponseMetadata", {})
        status, headers = metadata.get("HTTPStatusCode"), metadata.get("HTTPHeaders")
        codes.add(str(content.get("Error", {}).get("Code")))
    else:
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
        if status is None and type(error).__module__.startswith("gcsfs"):  # elsewhere `code` is not an HTTP status
            status = getattr(error, "code", None)
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    number = int(str(status)) if str(status).isdecimal() else 0
    wait_s = _retry_after_s(cast("Mapping[Any, Any]", headers)) if isinstance(headers, Mapping) else None
    return _Response(number if 100 <= number < 600 else None, codes, wait_s)


def _retry_after_s(headers: Mapping[Any, Any]) -> float | None:
    by_name = {str(name).lower(): str(value) for name, value in headers.items()}
    value = by_name.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError, KeyError):  # a date, relative to the server's own clock
        then, now = (email.utils.parsedate_to_datetime(date) for date in (value, by_name["date"]))
        return max(0.0, (then - now).total_seconds())
    return None


class Retries:
    """Retries transient failures with exponential backoff and jitter. One per storage; any thread.

    `renew`: makes the storage reload its credentials. `pause`: sleeps for at most the given time; returns whether to
    stop. `run` raises StorageLost naming the file, the status and the remedy.
    """

    def __init__(
        self,
        retry_s: float,
        *,
        renew: Callable[[], None],
        pause: Callable[[float], bool],
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._retry_s = retry_s
        self._renew, self._pause, self._clock, self._draw = renew, pause, clock, draw
        self._has_worked = False
        self._lock = threading.Lock()
        """Guards the outage log, shared by all threads."""
        self._failing_from_s: float | None = None
        """Start of the outage that was logged."""
        self._logged_s = float("-inf")
        self._failures = 0

    def run(self, call: Callable[[], _T], file: str) -> _T:
        """Call until it succeeds; return its result."""
        from_s: float | None = None
        attempts = damages = 0
        while True:
            try:
                result = call()
            except Exception as error:
                damages += isinstance(error, Damaged)
                failure = Failure("transient", str(error)) if isinstance(error, Damaged) else classify(error)
                if failure is None:
                    raise
                if damages > 1:
                    raise StorageLost(
                        f"{file} is damaged: {failure.status}, also when read again; restore the original file"
                    ) from error
            else:
                self._has_worked = True
                if from_s is not None:
                    self._log_recovery(file)
                return result
            from_s = self._clock() if from_s is None else from_s
            self._wait(failure, file, from_s, attempts)
            attempts += 1

    def _wait(self, failure: Failure, file: str, from_s: float, attempts: int) -> None:
        """Back off before the next attempt. Raises StorageLost if there is none."""
        since_s = self._clock() - from_s
        left_s = -since_s
        if failure.kind == "transient":
            left_s += self._retry_s
        elif failure.kind == "denied" and self._has_worked:  # credentials that never worked are not worth waiting for
            left_s += min(self._retry_s, _DENIED_S)
            try:  # on every attempt: while they are replaced, the files may be missing or half written
                self._renew()
            except Exception as error:  # noqa: BLE001 - clients raise arbitrary exceptions
                status = f"{failure.status}; its credentials cannot be read: {error}"
                failure = replace(failure, status=status)
        if left_s <= 0:
            _give_up(file, failure, since_s)
        self._log_failure(file, failure, since_s)
        jitter_s = self._draw() * min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2 ** min(attempts, 16))
        if self._pause(min(left_s, max(jitter_s, failure.retry_after_s or 0.0))):
            raise StorageLost(f"{file}: read cancelled, as this node is shutting down", is_transient=True)

    def _log_failure(self, file: str, failure: Failure, since_s: float) -> None:
        """Log the start of an outage, and reminders."""
        with self._lock:
            now_s = self._clock()
            self._failures += 1
            is_new = self._failing_from_s is None
            if now_s - self._logged_s < (_QUIET_S if is_new else _REMIND_S):
                return
            from_s = self._failing_from_s = now_s - since_s if self._failing_from_s is None else self._failing_from_s
            self._logged_s = now_s
            fields = {"file": file, "status": failure.status, "since_s": round(now_s - from_s, 1)}
            fields["failures"] = self._failures
        action = "reloading its credentials" if failure.kind == "denied" else "retrying"
        state = "data storage is failing" if is_new else "data storage is still failing"
        _log.warning(f"{state}; {action}", extra={"fields": fields})

    def _log_recovery(self, file: str) -> None:
        with self._lock:
            if self._failing_from_s is None:
                return
            took_s = round(self._clock() - self._failing_from_s, 1)
            fields = {"file": file, "took_s": took_s, "failures": self._failures}
            self._failing_from_s, self._failures = None, 0
        _log.info("data storage has recovered", extra={"fields": fields})


@contextlib.contextmanager
def refusing(what: str, remark: str = "") -> Generator[None]:
    """Turn a StorageLost that no retry helps into a ConfigError that begins with `what` and ends with `remark`."""
    try:
        yield
    except StorageLost as lost:
        if lost.is_transient:
            raise
        raise ConfigError(f"{what}: {lost}{remark}") from lost


def _give_up(file: str, failure: Failure, tried_s: float) -> NoReturn:
    match failure.kind:
        case "missing":
            raise StorageLost(f"{file} does not exist ({failure.status}); restore it, or correct data.source.path")
        case "permanent":
            raise StorageLost(f"{file} cannot be read ({failure.status}); correct data.source.path, or the file")
        case "denied":
            raise StorageLost(
                f"{file}: the storage refuses this node's credentials, tried for {tried_s:.0f} s ({failure.status}); "
                "provide valid ones and restart the node"
            )
        case "transient":
            raise StorageLost(
                f"{file}: the storage failed for {tried_s:.0f} s (data.retry_s), last with {failure.status}; restart "
                "the node when it has recovered, or raise data.retry_s",
                is_transient=True,
            )
