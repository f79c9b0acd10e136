"""`zeroband launch TORCHRUN_ARGS ...`: torchrun, ending as Docker, Slurm and systemd expect.

torchrun alone makes exit code 1 of every signal, and dies of SIGUSR1 with its ranks. Here the first SIGTERM or SIGUSR1
goes to the ranks, which hand over their work and leave (0 if all did); a second one ends everything at once (143).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType

from zeroband.cluster.processes import ranks_of, signal_all, start_leashed

_LEAVING_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def main(argv: Sequence[str]) -> int:
    """Run torchrun with these arguments. Returns the exit code."""
    torchrun = start_leashed(
        [sys.executable, "-m", "torch.distributed.run", *argv],
        env=os.environ,
        output=None,
        death_signal=signal.SIGTERM,
    )
    signals = _Signals(torchrun)
    for number in (*_LEAVING_SIGNALS, signal.SIGINT):
        signal.signal(number, signals.take)
    code = torchrun.wait()
    return 128 + signals.ended_by if signals.ended_by else code if code >= 0 else 128 - code


class _Signals:
    """Where the signals of this process go."""

    def __init__(self, torchrun: subprocess.Popen[bytes]) -> None:
        self._torchrun = torchrun
        self._is_asked = False
        self.ended_by = 0
        """The signal that ended torchrun at once; 0 while the ranks may end by themselves."""

    def take(self, number: int, _frame: FrameType | None) -> None:
        ranks = ranks_of(self._torchrun.pid)
        if number in _LEAVING_SIGNALS and ranks and not self._is_asked:
            self._is_asked = True
            signal_all(ranks, signal.SIGTERM)
        else:
            self.ended_by = int(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
            self._torchrun.send_signal(self.ended_by)
