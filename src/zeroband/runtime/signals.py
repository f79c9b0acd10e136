"""The signals that ask a rank to end, obeyed in time whatever its main thread does.

Python runs a signal's handler between two bytecodes of the main thread, which an operation in C++ may keep waiting. So
a thread hears of each signal, too. It lets a node leave in the middle of an inner step that does not end within
`fault.grace_s`, and ends the process where the main thread does not come to it: the guardian then gives the lease back.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType

from zeroband.elastic.membership.departure import Departure
from zeroband.errors import Leaving
from zeroband.node.launched import LEAVING_SIGNALS, LeaveRequests, handle

_UNWIND_S = 10.0
"""To give everything back, at most."""
_REACT_S = 3.0
"""For the main thread to come out of an operation, at most; with `fault.grace_s` below the usual 30 s until SIGKILL."""
_LOOK_S = 0.1
_HEARD = b"zeroband: interrupted; this node gives back what it holds. Ctrl-C again ends it at once\n"
_EXIT_INTERRUPTED, _EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


class Ending:
    """Takes SIGINT, SIGTERM, SIGUSR1 and SIGHUP while the context lasts. Main thread.

    The first of the last three asks for the departure; without work to hand over, and at the second one (those within
    2 s count as one), the process ends at once, through the main thread's `finally` blocks: SystemExit with 0 and 143,
    with 130 after Ctrl-C. A second Ctrl-C does not wait for those; after the context no signal raises anything.
    `end`: ends this process without them. `says`: whether to tell the user at once that Ctrl-C was heard.
    """

    def __init__(
        self, departure: Departure, *, ranks: int, says: bool = False, end: Callable[[int], object] = os._exit
    ) -> None:
        self._says = says
        self._departure = departure
        self._ranks = ranks
        self._end = end
        self._main = threading.get_ident()
        self._asked = LeaveRequests()
        """Taken by the main thread."""
        self._code: int | None = None
        """With which it ends at once."""
        self._heard = LeaveRequests()
        """Heard by the thread."""
        self._is_interrupted = False
        self._end_at_s = self._stuck_at_s = math.inf

    def __enter__(self) -> Ending:
        self._hears, self._tells = os.pipe()
        os.set_blocking(self._tells, False)
        self._before = signal.set_wakeup_fd(self._tells, warn_on_full_buffer=False)
        signal.signal(signal.SIGALRM, self._cut_short)
        handle(dict.fromkeys((signal.SIGINT, *LEAVING_SIGNALS), self._take))
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handle(dict.fromkeys((signal.SIGINT, *LEAVING_SIGNALS), self._take_late))
        signal.set_wakeup_fd(self._before)
        os.close(self._tells)
        self._thread.join()
        os.close(self._hears)

    def excuse(self) -> int | None:
        """The exit code of a process whose work broke off since it was to end: its other ranks are gone; else None."""
        is_over = self._code is None and self._departure.is_overdue(time.monotonic())
        return 0 if is_over else self._code

    def _take(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler."""
        if number == signal.SIGINT and self._code == _EXIT_INTERRUPTED:
            self._end(_EXIT_INTERRUPTED)
        elif number == signal.SIGINT:
            self._code = _EXIT_INTERRUPTED
            if self._says:
                with contextlib.suppress(OSError):
                    os.write(sys.stderr.fileno(), _HEARD)  # a handler may not print
        elif self._asked.add(time.monotonic()):
            self._departure.ask(time.monotonic())
            if self._asked.count > 1:
                self._code = _EXIT_TERMINATED
            elif not self._departure.holds_work:
                self._code = 0
        else:  # it may be unwinding, which the same request must not disturb
            return
        if self._code is not None:
            raise SystemExit(self._code)

    def _take_late(self, number: int, _frame: FrameType | None) -> None:
        """A signal handler: everything is given back."""
        self._end(_EXIT_INTERRUPTED if number == signal.SIGINT else self._code or 0)

    def _cut_short(self, _number: int, _frame: FrameType | None) -> None:
        """A signal handler: leave the inner step where it is."""
        if self._departure.is_in_step:
            self._departure.is_in_step = False
            self._departure.is_cut_short = True
            raise Leaving("asked to leave, and the inner step in progress took longer than fault.grace_s")

    # -- in the thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._hears, select.POLLIN)
        while True:
            if poll.poll(1e3 * _LOOK_S if self._heard.count or self._is_interrupted else None):
                signals = os.read(self._hears, 64)
                if not signals:
                    return
                self._hear(signals, time.monotonic())
            self._look(time.monotonic())

    def _hear(self, signals: bytes, now_s: float) -> None:
        """The main thread takes them, too, if it can."""
        self._is_interrupted |= signal.SIGINT in signals
        for number in signals:
            if number in LEAVING_SIGNALS and self._heard.add(now_s):
                self._departure.ask(now_s)
        asked = self._heard.count
        if self._is_interrupted or asked > 1 or (asked and not self._departure.holds_work):
            self._end_at_s = min(self._end_at_s, now_s + _UNWIND_S)

    def _look(self, now_s: float) -> None:
        departure = self._departure
        if not departure.is_in_step:
            self._stuck_at_s = math.inf
        elif self._stuck_at_s == math.inf and departure.is_overdue(now_s):
            self._stuck_at_s = now_s + _REACT_S
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(self._main, signal.SIGALRM)
            if self._ranks > 1:  # they may wait for one another in an exchange that this one has left
                self._end_at_s = min(self._end_at_s, now_s + _UNWIND_S)
        if now_s >= self._stuck_at_s:
            departure.on_cut_off()
        if now_s >= min(self._stuck_at_s, self._end_at_s):
            self._end(self._code_heard())

    def _code_heard(self) -> int:
        if self._is_interrupted:
            return _EXIT_INTERRUPTED
        return _EXIT_TERMINATED if self._heard.count > 1 else 0
