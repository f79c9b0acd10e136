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
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, cast

from zeroband.errors import StorageLost
from zeroband.observe.log import get_logger

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 30.0
_REFUSED_S = 60.0
"""Time for new credentials to come into force."""
_REMIND_S = 30.0
_QUIET_S = 60.0
"""Least time between two words of outages that ended."""

_PASSING_STATUS = {408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524}
_PASSING_CODES = {
    *("SlowDown", "RequestTimeout", "RequestTimeoutException", "RequestLimitExceeded", "Throttling", "InternalError"),
    *("ThrottlingException", "TooManyRequestsException", "BandwidthLimitExceeded", "ServiceUnavailable"),
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
    answers = [_answer_of(one) for one in chain]
    told = next((answer.status for answer in answers if answer.status is not None), None)
    codes = {code for answer in answers for code in answer.codes}
    text = " ".join(str(one) for one in chain)[:300]
    status = str(told) if told is not None else next(iter(sorted(codes & (_PASSING_CODES | _REFUSED_CODES))), "")
    shown = f"{status}: {text}" if status else f"{type(error).__name__}: {text}"
    wait_s = next((answer.retry_after_s for answer in answers if answer.retry_after_s is not None), None)
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


class _Answer(NamedTuple):
    """What an error tells of a server's answer."""

    status: int | None
    codes: set[str]
    """Those of the service, and the error's own name."""
    retry_after_s: float | None


def _answer_of(error: BaseException) -> _Answer:
    response: Any = getattr(error, "response", None)
    codes = {type(error).__name__}
    if isinstance(response, Mapping):  # botocore
        told = cast("Mapping[str, Any]", response)
        answer = told.get("ResponseMetadata", {})
        status, headers = answer.get("HTTPStatusCode"), answer.get("HTTPHeaders")
        codes.add(str(told.get("Error", {}).get("Code")))
    else:
        status = getattr(error, "status", None) or getattr(response, "status_code", None)
        if status is None and type(error).__module__.startswith("gcsfs"):  # others call other things a code
            status = getattr(error, "code", None)
        headers = getattr(error, "headers", None) or getattr(response, "headers", None)
    number = int(str(status)) if str(status).isdecimal() else 0
    waits = _retry_after_s(cast("Mapping[Any, Any]", headers)) if isinstance(headers, Mapping) else None
    return _Answer(number if 100 <= number < 600 else None, codes, waits)


def _retry_after_s(headers: Mapping[Any, Any]) -> float | None:
    by_name = {str(name).lower(): str(value) for name, value in headers.items()}
    wanted = by_name.get("retry-after", "")
    with contextlib.suppress(ValueError):
        return max(0.0, float(wanted))
    with contextlib.suppress(ValueError, TypeError, KeyError):  # a date, by the clock of the server alone
        then, now = (email.utils.parsedate_to_datetime(date) for date in (wanted, by_name["date"]))
        return max(0.0, (then - now).total_seconds())
    return None


class Retries:
    """Tries again what fails for now, and tells how it goes. One for each storage; any thread.

    `renew`: has the storage read its credentials again. `pause`: sleeps for at most that time, and says whether all is
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
        self._has_worked = False
        self._lock = threading.Lock()
        """Guards what is told, once for all threads."""
        self._failing_from_s: float | None = None
        """Since when the storage fails, where that was told."""
        self._told_s = float("-inf")
        self._failures = 0

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
                    self._tell_end(file)
                return result
            from_s = self._clock() if from_s is None else from_s
            self._wait(failure, file, from_s, attempts)
            attempts += 1

    def _wait(self, failure: Failure, file: str, from_s: float, attempts: int) -> None:
        """Pause until the next attempt. Raises StorageLost where there is none."""
        since_s = self._clock() - from_s
        left_s = -since_s
        if failure.kind == "passing":
            left_s += self._retry_s
        elif failure.kind == "refused" and self._has_worked:  # what was never let in has no new credentials to wait for
            left_s += min(self._retry_s, _REFUSED_S)
            try:  # those that are being replaced may be half written, or away for a moment: each attempt tries anew
                self._renew()
            except Exception as error:  # noqa: BLE001 - clients raise what they like, and once this way worked
                status = f"{failure.status}; its credentials cannot be read: {error}"
                failure = replace(failure, status=status)
        if left_s <= 0:
            _give_up(file, failure, since_s)
        self._tell(file, failure, since_s)
        jitter_s = self._draw() * min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(attempts, 16))
        if self._pause(min(left_s, max(jitter_s, failure.retry_after_s or 0.0))):
            raise StorageLost(f"{file}: not read any more, as this node ends", can_pass=True)

    def _tell(self, file: str, failure: Failure, since_s: float) -> None:
        """Log that the storage begins to fail, and now and then that it still does."""
        with self._lock:
            now_s = self._clock()
            self._failures += 1
            is_new = self._failing_from_s is None
            if now_s - self._told_s < (_QUIET_S if is_new else _REMIND_S):
                return
            from_s = self._failing_from_s = now_s - since_s if self._failing_from_s is None else self._failing_from_s
            self._told_s = now_s
            fields = {"file": file, "status": failure.status, "since_s": round(now_s - from_s, 1)}
            fields["failures"] = self._failures
        what = "reading its credentials again" if failure.kind == "refused" else "trying again"
        begins = "the storage of the data fails" if is_new else "the storage of the data still fails"
        _log.warning(f"{begins}; {what}", extra={"fields": fields})

    def _tell_end(self, file: str) -> None:
        with self._lock:
            if self._failing_from_s is None:
                return
            took_s = round(self._clock() - self._failing_from_s, 1)
            fields = {"file": file, "took_s": took_s, "failures": self._failures}
            self._failing_from_s, self._failures = None, 0
        _log.info("the storage of the data answers again", extra={"fields": fields})


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
