"""Storage that fails: which failures pass, how long they are waited out, and what is said of it. Any thread.

What the clients of object stores raise is of many kinds; here it becomes a status and one of four ways to go on.
"""

from __future__ import annotations

import contextlib
import email.utils
import errno
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, TypeVar, cast

from zeroband.errors import StorageLost
from zeroband.observe.log import get_logger

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0
_REFUSED_S = 60.0
"""Time for new credentials to come into force."""
_REMIND_S = 30.0
_QUIET_S = 60.0
"""Failures that pass are told at most so often."""

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524}
_PASSING_CODES = {
    *("SlowDown", "RequestTimeout", "RequestTimeoutException", "RequestLimitExceeded", "Throttling", "InternalError"),
    *(
        "ThrottlingException",
        "TooManyRequestsException",
        "BandwidthLimitExceeded",
        "ServiceUnavailable",
    ),
}
_REFUSED_CODES = {
    *("ExpiredToken", "ExpiredTokenException", "InvalidToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"),
    *("AccessDenied", "RequestExpired", "TokenRefreshRequired", "NoCredentialsError", "PartialCredentialsError"),
    *("CredentialRetrievalError", "UnauthorizedSSOTokenError", "RefreshError", "DefaultCredentialsError"),
}
_LASTING_ERRNO = {errno.EISDIR, errno.ENOTDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP}

_log = get_logger(__name__)

_T = TypeVar("_T")
Kind = Literal["passing", "refused", "gone", "lasting"]


class Damaged(Exception):
    """A file does not hold what it should: told twice in a row it is no accident of the way."""


@dataclass(frozen=True)
class Failure:
    """What an error of a storage client means."""

    kind: Kind
    status: str
    """HTTP status, code of the service, or the error itself, for people."""
    retry_after_s: float | None = None
    """How long the server asks to be left alone."""


def failure_of(error: Exception) -> Failure | None:
    """What an error means; None for one that no storage raises."""
    chain = list(_chain(error))
    if any(type(one).__name__ == "OfflineModeIsEnabled" for one in chain):
        return Failure("lasting", "the Hugging Face Hub is switched off (HF_HUB_OFFLINE)")
    told = next((status for one in chain if (status := _http_status(one)) is not None), None)
    codes = {code for one in chain for code in _codes(one)}
    text = " ".join(str(one) for one in chain)[:300]
    status = str(told) if told is not None else next(iter(sorted(codes & (_PASSING_CODES | _REFUSED_CODES))), "")
    shown = f"{status}: {text}" if status else f"{type(error).__name__}: {text}"
    wait_s = next((wait for one in chain if (wait := _retry_after_s(one)) is not None), None)
    if codes & _REFUSED_CODES:
        return Failure("refused", shown)
    if told in _PASSING_STATUS or codes & _PASSING_CODES:
        return Failure("passing", shown, wait_s)
    if told in (401, 403) or isinstance(error, PermissionError) or text.startswith("Forbidden"):
        return Failure("refused", shown)
    if told in (404, 410) or (isinstance(error, FileNotFoundError) and not any(map(_is_of_the_way, chain))):
        return Failure("gone", shown)
    if told is not None and 400 <= told < 500:
        return Failure("lasting", shown)
    is_foreign = type(error).__module__.partition(".")[0] not in ("builtins", "zeroband")
    if isinstance(error, OSError):
        return Failure("lasting" if error.errno in _LASTING_ERRNO else "passing", shown, wait_s)
    if isinstance(error, ValueError) and not is_foreign:
        return Failure("lasting", shown)  # gcsfs makes one of an answer of 400
    return Failure("passing", shown, wait_s) if is_foreign else None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_of_the_way(error: BaseException) -> bool:
    """Whether a server was not reached, of which fsspec says that there is no such file."""
    kinds = {kind.__name__ for kind in type(error).__mro__}  # aiohttp's errors are not all OSErrors
    return bool(kinds & {"ClientConnectionError", "ConnectionError", "TimeoutError"})


def _http_status(error: BaseException) -> int | None:
    response: Any = getattr(error, "response", None)
    found: Any
    if isinstance(response, Mapping):  # botocore
        found = cast("Mapping[str, Any]", response).get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(error, "status", None) or getattr(response, "status_code", None)
        if found is None and type(error).__module__.startswith("gcsfs"):  # others call other things a code
            found = getattr(error, "code", None)
    with contextlib.suppress(ValueError):
        status = int(str(found))
        return status if 100 <= status < 600 else None
    return None


def _codes(error: BaseException) -> Iterator[str]:
    yield type(error).__name__
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        yield str(cast("Mapping[str, Any]", response).get("Error", {}).get("Code"))


def _retry_after_s(error: BaseException) -> float | None:
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):
        headers: Any = cast("Mapping[str, Any]", response).get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    if not isinstance(headers, Mapping):
        return None
    by_name = {str(name).lower(): str(value) for name, value in cast("Mapping[Any, Any]", headers).items()}
    wanted = by_name.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(wanted))
    with contextlib.suppress(ValueError, TypeError, KeyError):  # a date, by the clock of the server alone
        then, now = (email.utils.parsedate_to_datetime(date) for date in (wanted, by_name["date"]))
        return max(0.0, (then - now).total_seconds())
    return None


class Retries:
    """Tries again what fails for now, and tells how it goes. One for each storage; any thread.

    `renew`: has the storage read its credentials again. `pause`: sleeps for at most so long, and says whether all is
    to end. Raises out of `run`: StorageLost naming the file, the status and the way out.
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
        self._log = _OutageLog(clock)
        self._has_worked = False

    def run(self, call: Callable[[], _T], file: str) -> _T:
        """Return what `call` returns, when it does."""
        from_s: float | None = None
        attempts = damages = 0
        while True:
            try:
                result = call()
            except Exception as error:
                damages += isinstance(error, Damaged)
                failure = Failure("passing", str(error)) if isinstance(error, Damaged) else failure_of(error)
                if failure is None:
                    raise
                if damages > 1:
                    raise StorageLost(
                        f"{file} is damaged: {failure.status}, and again when it was read anew; bring it back as it was"
                    ) from error
            else:
                self._has_worked = True
                if from_s is not None:
                    self._log.ends(file)
                return result
            from_s = self._clock() if from_s is None else from_s
            self._wait(failure, file, from_s, attempts)
            attempts += 1

    def _wait(self, failure: Failure, file: str, from_s: float, attempts: int) -> None:
        """Pause until the next attempt. Raises StorageLost where there is none."""
        since_s = self._clock() - from_s
        left_s = self._limit_s(failure) - since_s
        if failure.kind == "refused" and self._has_worked:
            failure = self._renewed(failure)
        if left_s <= 0:
            _give_up(file, failure, since_s)
        self._log.goes_on(file, failure, since_s)
        jitter_s = self._draw() * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempts, 16))
        if self._pause(min(left_s, max(jitter_s, failure.retry_after_s or 0.0))):
            raise StorageLost(f"{file}: not read any more, as this node ends", can_pass=True)

    def _renewed(self, failure: Failure) -> Failure:
        """Have credentials read again; the failure, and why that could not be done.

        Those that are being replaced may be half written, or away for a moment: each attempt tries anew.
        """
        try:
            self._renew()
        except Exception as error:  # noqa: BLE001 - clients raise what they like, and once this way worked
            return replace(failure, status=f"{failure.status}; its credentials cannot be read: {error}")
        return failure

    def _limit_s(self, failure: Failure) -> float:
        """How long a failure of this kind is waited out."""
        match failure.kind:
            case "passing":
                return self._retry_s
            case "refused":  # what was never let in has no reason to wait for new credentials
                return min(self._retry_s, _REFUSED_S) if self._has_worked else 0.0
            case _:
                return 0.0


def _give_up(file: str, failure: Failure, tried_s: float) -> NoReturn:
    match failure.kind:
        case "gone":
            raise StorageLost(f"{file} is not there ({failure.status}); bring it back, or correct data.source.path")
        case "lasting":
            raise StorageLost(f"{file} cannot be read ({failure.status}); correct data.source.path, or the file")
        case "refused":
            raise StorageLost(
                f"{file}: the storage refuses this node's credentials, tried for {tried_s:.0f} s ({failure.status}); "
                "give it valid ones and start the node again"
            )
        case "passing":
            raise StorageLost(
                f"{file}: the storage did not give it for {tried_s:.0f} s (data.retry_s), at last: {failure.status}; "
                "start the node again when it does, or raise data.retry_s",
                can_pass=True,
            )


class _OutageLog:
    """Says once for all threads when a storage begins to fail, now and then that it still does, and when it is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._from_s: float | None = None
        """Since when it fails, where that was said."""
        self._said_s = float("-inf")
        self._failures = 0

    def goes_on(self, file: str, failure: Failure, since_s: float) -> None:
        with self._lock:
            now_s = self._clock()
            self._failures += 1
            is_new = self._from_s is None
            if now_s - self._said_s < (_QUIET_S if is_new else _REMIND_S):
                return
            self._from_s = now_s - since_s if self._from_s is None else self._from_s
            self._said_s = now_s
            fields = {"file": file, "status": failure.status, "since_s": round(now_s - self._from_s, 1)}
            fields["failures"] = self._failures
        what = "reading its credentials again" if failure.kind == "refused" else "trying again"
        begins = "the storage of the data fails" if is_new else "the storage of the data still fails"
        _log.warning(f"{begins}; {what}", extra={"fields": fields})

    def ends(self, file: str) -> None:
        with self._lock:
            if self._from_s is None:
                return
            fields = {"file": file, "took_s": round(self._clock() - self._from_s, 1), "failures": self._failures}
            self._from_s, self._failures = None, 0
        _log.info("the storage of the data answers again", extra={"fields": fields})
