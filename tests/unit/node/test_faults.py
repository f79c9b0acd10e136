import contextlib
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from zeroband.errors import ConfigError
from zeroband.node.faults import POINTS, Fault, FaultPoints, parse_fault, signal_node


def struck_by(specs: Sequence[str], rounds: Sequence[int], **ranks: bool) -> list[tuple[str, int, str]]:
    """(point, round, action) of what strikes a rank that passes all points of these rounds."""
    struck: list[tuple[str, int, str]] = []
    point, round = "", 0
    faults = FaultPoints(specs, strike=lambda action: struck.append((point, round, action)), **ranks)
    for round in rounds:
        for point in POINTS:
            faults.at(point, round)
    return struck


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ("opened@3=SIGKILL", Fault("opened", 3, "SIGKILL")),
        ("inner@12=SIGSTOP", Fault("inner", 12, "SIGSTOP")),
        ("transfer50@+1=SIGTERM", Fault("transfer50", 1, "SIGTERM", is_relative=True)),
        ("voted@2=OOM", Fault("voted", 2, "OOM")),
        ("inner@2=SLOW10", Fault("inner", 2, "SLOW", number=10.0)),
        ("inner@1=TAKES0.25", Fault("inner", 1, "TAKES", number=0.25)),
        ("inner@+0=SLOW2.5", Fault("inner", 0, "SLOW", number=2.5, is_relative=True)),
    ],
)
def test_fault_is_read_from_its_spec(spec: str, fault: Fault) -> None:
    assert parse_fault(spec) == fault


@pytest.mark.parametrize(
    "spec",
    [
        *("", "opened", "opened@3", "opened@x=SIGKILL", "lunch@3=SIGKILL", "opened@3=SIGFOO", "opened@-1=SIGTERM"),
        *("inner@1=SLOW", "inner@1=SLOWx", "inner@1=SLOW-2", "inner@1=SLOW2.", "inner@1=OOM2", "inner@1=oom"),
        *("inner@1=STOP", "transfer75@1=OOM", "SLOW10", "inner@1=SLOW10 ", "inner@1=TAKES"),
    ],
)
def test_fault_that_makes_no_sense_is_the_users_error_and_names_the_points(spec: str) -> None:
    with pytest.raises(ConfigError, match=f"fault.inject='{spec}'.*{', '.join(POINTS)}"):
        parse_fault(spec)


@pytest.mark.parametrize("factor", ["0", "0.5"])
def test_slow_fault_that_would_make_the_node_faster_is_refused(factor: str) -> None:
    with pytest.raises(ConfigError, match="SLOW"):
        parse_fault(f"inner@1=SLOW{factor}")


def test_fault_strikes_once_at_its_point_and_round() -> None:
    assert struck_by(["reduced@2=SIGSTOP"], rounds=(1, 2, 2, 3)) == [("reduced", 2, "SIGSTOP")]


@pytest.mark.parametrize("rounds", [(7, 8, 9, 10), (7, 8, 11, 12)], ids=["each", "some without it"])
def test_relative_fault_counts_the_rounds_that_the_node_took_part_in(rounds: Sequence[int]) -> None:
    assert struck_by(["opened@+2=SIGKILL"], rounds) == [("opened", rounds[2], "SIGKILL")]


def test_relative_fault_of_a_late_node_waits_for_the_round_that_it_is_in() -> None:
    """The others commit rounds without it, whose points it passes in part, or not at all."""
    struck: list[str] = []
    faults = FaultPoints(["inner@+1=SIGKILL"], strike=struck.append)
    for round in (7, 8, 11):
        for point in ("inner", "ready", "waiting"):
            faults.at(point, round)
    assert struck == []
    faults.at("applied", 11)
    faults.at("inner", 12)
    assert struck == ["SIGKILL"]


def test_relative_fault_of_a_joiner_does_not_count_from_where_it_fetched_the_state() -> None:
    struck: list[str] = []
    faults = FaultPoints(["joining@+0=SIGSTOP", "waiting@+1=SIGKILL"], strike=struck.append)
    faults.at("joining", 0)
    assert struck == ["SIGSTOP"]
    for round in (7, 8):
        assert struck == ["SIGSTOP"]
        faults.at("waiting", round)
        faults.at("applied", round)
    assert struck == ["SIGSTOP", "SIGKILL"]


def test_relative_fault_of_a_node_that_leaves_belongs_to_no_round() -> None:
    struck: list[str] = []
    faults = FaultPoints(["leaving@+0=SIGKILL"], strike=struck.append)
    faults.at("waiting", 7)
    faults.at("leaving", 0)
    assert struck == ["SIGKILL"]


def test_faults_at_one_point_all_strike() -> None:
    struck = struck_by(["applied@1=SIGSTOP", "applied@1=SIGTERM", "ready@2=SIGKILL"], rounds=(1,))
    assert struck == [("applied", 1, "SIGSTOP"), ("applied", 1, "SIGTERM")]


RANKS = """
import multiprocessing, os, time
from pathlib import Path
from zeroband.node.faults import signal_node

def rank(number):
    os.environ["LOCAL_RANK"] = str(number)
    os.execvp("sleep", ["sleep", "20"])

children = [multiprocessing.Process(target=rank, args=(n,)) for n in range(2)]
[child.start() for child in children]
while any(b"LOCAL_RANK" not in Path(f"/proc/{c.pid}/environ").read_bytes() for c in children):
    time.sleep(0.01)
os.environ["LOCAL_WORLD_SIZE"] = "2"
os.getppid = os.getpid
signal_node("OOM")
children[1].join(10)
print([child.exitcode for child in children])
[child.kill() for child in children]
"""


@pytest.mark.slow
def test_machine_without_memory_loses_its_last_rank_alone() -> None:
    said = subprocess.run([sys.executable, "-c", RANKS], capture_output=True, text=True, timeout=60)
    assert said.stdout == "[None, -9]\n", said.stderr


def test_slow_node_takes_its_factor_from_the_point_on_and_nobody_is_struck() -> None:
    struck: list[str] = []
    faults = FaultPoints(["inner@2=SLOW10", "inner@4=SLOW1"], strike=struck.append)
    extra_s = []
    for round in range(1, 6):
        faults.at("inner", round)
        extra_s.append(faults.extra_s(0.5))
    assert extra_s == [0.0, 4.5, 4.5, 0.0, 0.0]
    assert struck == []


def test_node_that_joins_is_slow_from_its_first_inner_step_also_where_it_takes_part_in_a_round_before() -> None:
    """Where every step is a round it does."""
    for points in (["inner"], ["opened", "applied", "inner"]):
        faults = FaultPoints(["inner@+0=TAKES2"])
        for point in points:
            faults.at(point, 7)
        assert faults.extra_s(0.5) == 1.5


def test_node_whose_steps_take_a_time_sleeps_for_the_rest_of_it() -> None:
    faults = FaultPoints(["inner@2=TAKES2"])
    faults.at("inner", 1)
    assert faults.extra_s(0.5) == 0.0
    faults.at("inner", 2)
    assert [faults.extra_s(step_s) for step_s in (0.5, 2.0, 3.0)] == [1.5, 0.0, 0.0]


@pytest.mark.parametrize(
    ("shares", "points"),
    [
        ([0.0, 0.25, 0.49], []),
        ([0.0, 0.5], ["transfer50"]),
        ([0.0, 0.6, 0.9, 0.98], ["transfer50"]),
        ([0.0, 0.99], ["transfer50", "transfer99"]),
        ([0.0, 1.0], ["transfer50", "transfer99"]),
        ([0.0, 0.5, 0.6, 0.99, 1.0], ["transfer50", "transfer99"]),
    ],
)
def test_transfer_passes_its_points_in_order_and_once(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], points: list[str]
) -> None:
    faults, passed = FaultPoints([]), []
    monkeypatch.setattr(faults, "at", lambda point, round: passed.append((point, round)))
    transfer = faults.transfer(3)
    for share in shares:
        transfer.reach(share)
    assert passed == [(point, 3) for point in points]


def test_transfer_that_is_tried_again_passes_its_points_again() -> None:
    struck: list[str] = []
    faults = FaultPoints(["transfer99@3=SIGSTOP"], strike=struck.append)
    faults.transfer(3).reach(0.6)
    assert struck == []
    faults.transfer(3).reach(1.0)
    assert struck == ["SIGSTOP"]


def test_point_that_does_not_exist_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="lunch"):
        FaultPoints([]).at("lunch", 1)


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("SIGKILL", [("parent", signal.SIGKILL), ("self", signal.SIGKILL)]),
        ("SIGSTOP", [("self", signal.SIGSTOP)]),
    ],
)
def test_sigkill_takes_the_launcher_along_and_other_signals_do_not(
    monkeypatch: pytest.MonkeyPatch, action: str, expected: list[tuple[str, signal.Signals]]
) -> None:
    class Killed(Exception):
        """Nothing runs after SIGKILL."""

    sent: list[tuple[str, int]] = []
    names = {111: "parent", 222: "self"}

    def kill(pid: int, number: int) -> None:
        sent.append((names[pid], number))
        if (names[pid], number) == ("self", signal.SIGKILL):
            raise Killed

    monkeypatch.setattr("os.getppid", lambda: 111)
    monkeypatch.setattr("os.getpid", lambda: 222)
    monkeypatch.setattr("os.kill", kill)
    with contextlib.suppress(Killed):
        signal_node(action)
    assert sent == expected
