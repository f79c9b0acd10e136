"""Signals that ask a rank to end, obeyed in time whatever its main thread does.

Python runs a signal handler between two bytecodes of the main thread, which a call into C++ can delay for minutes. So a
thread also receives each signal, through the wakeup pipe. It lets a node leave in the middle of an inner step that does
not end within `fault.grace_s`, and ends the process if the main thread does not react: the guardian then releases the
lease.
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
"""Longest time to release everything."""
_REACT_S = 3.0
"""Longest time for the main thread to return from a call; with `fault.grace_s` below the usual 30 s until SIGKILL."""
_LOOK_S = 0.1
_INTERRUPT_NOTICE = b"zeroband: interrupted; this node shuts down. Ctrl-C again ends it at once\n"
_EXIT_INTERRUPTED, _EXIT_TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


class SignalHandling:
    """Handles SIGINT, SIGTERM, SIGUSR1 and SIGHUP within the context. Main thread.

    The first of SIGTERM, SIGUSR1 or SIGHUP asks the node to leave. Without work to hand over, and at the second signal
    (those within 2 s count as one), the process ends at once through the main thread's `finally` blocks: SystemExit
    with 0 and 143, with 130 after Ctrl-C. A second Ctrl-C skips the `finally` blocks; after the context no signal
    raises.
    `end`: ends this process without `finally` blocks. `announces`: confirm Ctrl-C to the user at once.
    """

    def __init__(
        self, departure: Departure, *, ranks: int, announces: bool = False, end: Callable[[int], object] = os._exit
    ) -> None:
        self._announces = announces
        self._departure = departure
        self._ranks = ranks
        self._end = end
        self._main = threading.get_ident()
        self._asked = LeaveRequests()
        """Seen by the main thread."""
        self._code: int | None = None
        """Exit code of an immediate end."""
        self._heard = LeaveRequests()
        """Seen by the thread."""
        self._is_interrupted = False
        self._end_at_s = self._stuck_at_s = math.inf

    def __enter__(self) -> SignalHandling:
        self._wakeup_read, self._wakeup_write = os.pipe()
        os.set_blocking(self._wakeup_write, False)
        self._before = signal.set_wakeup_fd(self._wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGALRM, self._interrupt_step)
        handle(dict.fromkeys((signal.SIGINT, *LEAVING_SIGNALS), self._on_signal))
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        handle(dict.fromkeys((signal.SIGINT, *LEAVING_SIGNALS), self._on_late_signal))
        signal.set_wakeup_fd(self._before)
        os.close(self._wakeup_write)  # the thread reads end of file, and ends
        self._thread.join()
        os.close(self._wakeup_read)

    def exit_code_of_failure(self) -> int | None:
        """Return the exit code if the work failed because this process was to end, as by missing ranks; else None."""
        is_over = self._code is None and self._departure.is_overdue(time.monotonic())
        return 0 if is_over else self._code

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._code == _EXIT_INTERRUPTED:
            self._end(_EXIT_INTERRUPTED)
        elif number == signal.SIGINT:
            self._code = _EXIT_INTERRUPTED
            if self._announces:
                with contextlib.suppress(OSError):
                    os.write(sys.stderr.fileno(), _INTERRUPT_NOTICE)  # print is not safe in a handler
        elif self._asked.add(time.monotonic()):
            self._departure.ask(time.monotonic())
            if self._asked.count > 1:
                self._code = _EXIT_TERMINATED
            elif not self._departure.holds_work:
                self._code = 0
        else:  # a repeated request must not disturb the shutdown that the first began
            return
        if self._code is not None:
            raise SystemExit(self._code)

    def _on_late_signal(self, number: int, _frame: FrameType | None) -> None:
        """End the process: everything was released."""
        self._end(_EXIT_INTERRUPTED if number == signal.SIGINT else self._code or 0)

    def _interrupt_step(self, _number: int, _frame: FrameType | None) -> None:
        """Break off the inner step. SIGALRM is the thread's way to raise in the main thread."""
        if self._departure.is_in_step:
            self._departure.is_in_step = False
            self._departure.is_cut_short = True
            raise Leaving("asked to leave, and the inner step in progress took longer than fault.grace_s")

    # -- in the thread ------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        poll = select.poll()
        poll.register(self._wakeup_read, select.POLLIN)
        while True:
            if poll.poll(1e3 * _LOOK_S if self._heard.count or self._is_interrupted else None):
                signals = os.read(self._wakeup_read, 64)
                if not signals:
                    return
                self._receive(signals, time.monotonic())
            self._enforce(time.monotonic())

    def _receive(self, signals: bytes, now_s: float) -> None:
        """Note signals; the main thread's handler sees them as well, if it gets to run."""
        self._is_interrupted |= signal.SIGINT in signals
        for number in signals:
            if number in LEAVING_SIGNALS and self._heard.add(now_s):
                self._departure.ask(now_s)
        asked = self._heard.count
        if self._is_interrupted or asked > 1 or (asked and not self._departure.holds_work):
            self._end_at_s = min(self._end_at_s, now_s + _UNWIND_S)

    def _enforce(self, now_s: float) -> None:
        """Interrupt an overdue inner step; end the process after its deadlines."""
        departure = self._departure
        if not departure.is_in_step:
            self._stuck_at_s = math.inf
        elif self._stuck_at_s == math.inf and departure.is_overdue(now_s):
            self._stuck_at_s = now_s + _REACT_S
            with contextlib.suppress(ProcessLookupError):
                signal.pthread_kill(self._main, signal.SIGALRM)
            if self._ranks > 1:  # other ranks may be stuck in a collective that this one has left
                self._end_at_s = min(self._end_at_s, now_s + _UNWIND_S)
        if now_s >= self._stuck_at_s:
            departure.on_cut_off()
        if now_s >= min(self._stuck_at_s, self._end_at_s):
            self._end(self._exit_code())

    def _exit_code(self) -> int:
        if self._is_interrupted:
            return _EXIT_INTERRUPTED
        return _EXIT_TERMINATED if self._heard.count > 1 else 0
