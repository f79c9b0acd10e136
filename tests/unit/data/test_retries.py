"""What errors of storage mean, and how long they are waited out; no time passes."""

from __future__ import annotations

import errno
from collections.abc import Iterator

import pytest

from zeroband.data.retries import Damaged, Retries, classify
from zeroband.errors import ConfigError, StorageLost


class ClientError(Exception):
    """As botocore's: what the service said is in a mapping."""

    __module__ = "botocore.exceptions"

    def __init__(self, code: str, status: int, **headers: str) -> None:
        super().__init__(code)
        self.response = {
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers},
        }


class ResponseError(Exception):
    """As aiohttp's."""

    __module__ = "aiohttp.client_exceptions"

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(str(status))
        self.status, self.headers = status, {name.replace("_", "-"): value for name, value in headers.items()}


class PayloadError(Exception):
    """An answer that was cut; aiohttp gives its inner error a code that is no status."""

    __module__ = "aiohttp.client_exceptions"
    code = 400


class HttpError(Exception):
    __module__ = "gcsfs.retry"

    def __init__(self, code: str) -> None:
        super().__init__("told")
        self.code = code


class ClientConnectionError(Exception):
    """As aiohttp's, of which some are no OSError."""

    __module__ = "aiohttp.client_exceptions"


class OfflineModeIsEnabled(ConnectionError):
    pass


def caused(error: Exception, by: Exception) -> Exception:
    error.__cause__ = by
    return error


def of_clients() -> Iterator[tuple[Exception, str]]:
    """Errors of real clients that are no errors of the system."""
    aiohttp = pytest.importorskip("aiohttp")
    yield aiohttp.ServerDisconnectedError(), "transient"
    yield aiohttp.ClientPayloadError("cut"), "transient"
    retry = pytest.importorskip("gcsfs.retry", reason="needs the extra gcs")
    yield retry.HttpError({"code": 503, "message": "busy"}), "transient"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        *of_clients(),
        (ResponseError(503), "transient"),
        (ResponseError(429), "transient"),
        (ResponseError(403), "denied"),
        (ResponseError(410), "missing"),
        (ResponseError(416), "permanent"),
        (PayloadError(), "transient"),
        (HttpError("502"), "transient"),
        (HttpError("401"), "denied"),
        (caused(OSError(errno.EIO, "slow"), ClientError("SlowDown", 503)), "transient"),
        (caused(OSError(errno.EIO, "slow"), ClientError("RequestTimeout", 400)), "transient"),
        (caused(PermissionError("expired"), ClientError("ExpiredToken", 400)), "denied"),
        (caused(FileNotFoundError("key"), ClientError("NoSuchKey", 404)), "missing"),
        (caused(FileNotFoundError("http://h/f"), ClientConnectionError("cannot connect")), "transient"),
        (caused(FileNotFoundError("http://h/f"), ResponseError(503)), "transient"),
        (FileNotFoundError("f"), "missing"),
        (ConnectionResetError(), "transient"),
        (TimeoutError(), "transient"),
        (OSError(errno.ESTALE, "mount"), "transient"),
        (OSError("Forbidden: bucket/o"), "denied"),
        (IsADirectoryError(errno.EISDIR, "folder"), "permanent"),
        (ValueError("Bad Request: o"), "permanent"),
        (OfflineModeIsEnabled(), "permanent"),
        (KeyError("ours"), None),
    ],
    ids=repr,
)
def test_error_of_storage_means_one_of_four_things(error: Exception, kind: str | None) -> None:
    failure = classify(error)
    assert (failure and failure.kind) == kind


@pytest.mark.parametrize(
    ("error", "wait_s"),
    [
        (ResponseError(429, Retry_After="7"), 7.0),
        (ResponseError(503, Retry_After="Tue, 03 Mar 2026 10:00:30 GMT", Date="Tue, 03 Mar 2026 10:00:00 GMT"), 30.0),
        (ResponseError(503, Retry_After="Tue, 03 Mar 2026 10:00:30 GMT"), None),
        (ResponseError(503, Retry_After="soon"), None),
        (caused(OSError(), ClientError("SlowDown", 503, **{"retry-after": "2"})), 2.0),
        (ResponseError(503), None),
    ],
)
def test_server_says_how_long_it_wants_to_be_left_alone(error: Exception, wait_s: float | None) -> None:
    failure = classify(error)
    assert failure is not None and failure.retry_after_s == wait_s


class Around:
    """A clock that pauses move, and a storage that fails as told."""

    def __init__(self, retry_s: float = 100.0) -> None:
        self.now_s, self.pauses, self.renewed, self.stops = 0.0, list[float](), 0, False
        self.unreadable = list[Exception]()
        """What goes wrong when credentials are read again."""
        self.retries = Retries(retry_s, renew=self.renew, pause=self.pause, clock=lambda: self.now_s, draw=lambda: 1.0)

    def renew(self) -> None:
        self.renewed += 1
        if self.unreadable:
            raise self.unreadable.pop()

    def pause(self, wait_s: float) -> bool:
        self.pauses.append(wait_s)
        self.now_s += wait_s
        return self.stops

    def run(self, *failures: Exception | None, for_ever: Exception | None = None) -> int:
        """How many attempts it took: these fail, None does not, and then all do that way."""
        attempts = 0

        def call() -> int:
            nonlocal attempts
            attempts += 1
            failure = failures[attempts - 1] if attempts <= len(failures) else for_ever
            if failure is not None:
                raise failure
            return attempts

        return self.retries.run(call, "s3://b/f")


def test_pauses_double_up_to_a_bound_and_leave_the_server_the_time_it_asks_for() -> None:
    around = Around(1000.0)
    assert around.run(*[ConnectionResetError()] * 8, ResponseError(429, Retry_After="40")) == 10
    assert around.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 40.0]


def test_silence_is_waited_out_for_the_time_that_is_set_and_no_longer() -> None:
    around = Around(100.0)
    with pytest.raises(
        StorageLost, match=r"s3://b/f: the storage failed for 100 s \(data.retry_s\), last with 503"
    ) as told:
        around.run(for_ever=ResponseError(503))
    assert around.now_s == 100.0 and told.value.is_transient


@pytest.mark.parametrize("error", [FileNotFoundError(), ResponseError(404), ResponseError(400), OfflineModeIsEnabled()])
def test_what_will_not_pass_is_not_tried_again(error: Exception) -> None:
    around = Around()
    with pytest.raises(StorageLost, match=r"^s3://b/f (does not exist|cannot be read) \(") as told:
        around.run(for_ever=error)
    assert not around.pauses and not told.value.is_transient


def test_refused_credentials_are_read_again_for_a_while_if_they_ever_held() -> None:
    around = Around()
    with pytest.raises(StorageLost, match="refuses this node's credentials, tried for 0 s"):
        around.run(for_ever=ResponseError(403))
    assert not around.renewed
    assert around.run(None) == 1
    assert around.run(ResponseError(401), ResponseError(403)) == 3 and around.renewed == 2
    from_s = around.now_s
    with pytest.raises(StorageLost, match=r"tried for 60 s .*; provide valid ones and restart the node"):
        around.run(for_ever=ResponseError(403))
    assert around.now_s - from_s == 60.0


def test_credentials_that_cannot_be_read_yet_are_read_again_with_the_next_attempt(
    caplog: pytest.LogCaptureFixture,
) -> None:
    around = Around()
    around.run(None)
    around.unreadable = [KeyError("secret"), ConfigError("no such profile")]
    assert around.run(*[ResponseError(403)] * 3) == 4 and around.renewed == 3
    assert caplog.records[0].fields["status"].endswith("; its credentials cannot be read: no such profile")  # type: ignore[attr-defined]
    around.unreadable = [ValueError("half a file") for _ in range(99)]
    with pytest.raises(StorageLost, match=r"tried for 60 s \(403.*; its credentials cannot be read: half a file\)"):
        around.run(for_ever=ResponseError(403))


def test_damage_is_read_once_more() -> None:
    around = Around()
    assert around.run(Damaged("hash"), ConnectionResetError()) == 3
    with pytest.raises(StorageLost, match="s3://b/f is damaged: hash, also when read again"):
        around.run(Damaged("hash"), ConnectionResetError(), Damaged("hash"))


def test_error_of_ours_is_not_hidden_and_the_end_of_the_node_ends_the_attempts() -> None:
    with pytest.raises(KeyError):
        Around().run(for_ever=KeyError("ours"))
    around = Around()
    around.stops = True
    with pytest.raises(StorageLost, match="read cancelled"):
        around.run(for_ever=ConnectionResetError())
    assert len(around.pauses) == 1


def test_outage_is_said_when_it_begins_now_and_then_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    around = Around(1000.0)
    around.run(*[ResponseError(503)] * 9)
    around.run(ResponseError(503))  # too soon after it to be said
    told = [(record.message, record.fields) for record in caplog.records]  # type: ignore[attr-defined]
    assert [(message, fields.get("since_s", fields.get("took_s")), fields["failures"]) for message, fields in told] == [
        ("data storage is failing; retrying", 0.0, 1),
        ("data storage is still failing; retrying", 31.8, 8),
        ("data storage is still failing; retrying", 61.8, 9),
        ("data storage has recovered", 91.8, 9),
    ]
    assert told[0][1]["file"] == "s3://b/f" and told[0][1]["status"] == "503: 503"
