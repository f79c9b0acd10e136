import signal

import pytest

from zeroband.errors import ConfigError
from zeroband.faults import POINTS, Fault, FaultPoints, parse_fault, signal_node


def test_fault_is_read_from_its_spec() -> None:
    assert parse_fault("opened@3=SIGKILL") == Fault("opened", 3, signal.SIGKILL)
    assert parse_fault("inner@12=SIGSTOP") == Fault("inner", 12, signal.SIGSTOP)


@pytest.mark.parametrize(
    "spec", ["", "opened", "opened@3", "opened@x=SIGKILL", "lunch@3=SIGKILL", "opened@3=SIGFOO", "opened@-1=SIGTERM"]
)
def test_fault_that_makes_no_sense_is_the_users_error_and_names_the_points(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"fault.inject='{spec}'.*{', '.join(POINTS)}"):
        parse_fault(spec)


def test_fault_strikes_once_at_its_point_and_round() -> None:
    struck: list[tuple[str, int]] = []
    here = ("", 0)
    faults = FaultPoints(["reduced@2=SIGSTOP"], strike=lambda _signal: struck.append(here))
    for here in [(point, round) for round in (1, 2, 2, 3) for point in POINTS]:
        faults.at(*here)
    assert struck == [("reduced", 2)]


def test_relative_fault_counts_from_the_first_round_that_the_node_passes() -> None:
    struck: list[tuple[str, int]] = []
    here = ("", 0)
    faults = FaultPoints(["opened@+2=SIGKILL"], strike=lambda _signal: struck.append(here))
    for here in [(point, round) for round in (7, 8, 9, 10) for point in POINTS]:
        faults.at(*here)
    assert struck == [("opened", 9)]
    assert parse_fault("opened@+2=SIGKILL").is_relative


def test_faults_at_one_point_all_strike() -> None:
    struck: list[signal.Signals] = []
    faults = FaultPoints(["applied@1=SIGSTOP", "applied@1=SIGTERM", "ready@1=SIGKILL"], strike=struck.append)
    faults.at("applied", 1)
    assert struck == [signal.SIGSTOP, signal.SIGTERM]


def test_point_that_does_not_exist_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="lunch"):
        FaultPoints([]).at("lunch", 1)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (signal.SIGKILL, [("parent", signal.SIGKILL), ("self", signal.SIGKILL)]),
        (signal.SIGSTOP, [("self", signal.SIGSTOP)]),
    ],
)
def test_sigkill_takes_the_launcher_along(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, expected: list[tuple[str, signal.Signals]]
) -> None:
    sent: list[tuple[str, int]] = []
    names = {111: "parent", 222: "self"}
    monkeypatch.setattr("os.getppid", lambda: 111)
    monkeypatch.setattr("os.getpid", lambda: 222)
    monkeypatch.setattr("os.kill", lambda pid, number: sent.append((names[pid], number)))
    signal_node(number)
    assert sent == expected
