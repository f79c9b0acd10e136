"""Faults from inside a node's processes: no descriptors are left, the wall clock jumps.

Each Python process of a node begins with a module that looks for the node's signs in a folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from zeroband.tools.chaos.plan import Kind

CLOCK_AHEAD_S = 7 * 3600
_FOLDER = "ZEROBAND_CHAOS_SIGNS"
_SIGNS = {Kind.DESCRIPTORS_GONE: "descriptors", Kind.CLOCK_JUMPS: "clock"}
_BEGINS = """
import os, resource, threading, time

where = os.path.join(os.environ["ZEROBAND_CHAOS_SIGNS"], os.environ.get("ZERO_BAND_NODE__ID", "nobody"))
seconds, nanoseconds, ahead_s = time.time, time.time_ns, [0]
time.time = lambda: seconds() + ahead_s[0]
time.time_ns = lambda: nanoseconds() + ahead_s[0] * 10**9

def is_there(sign):
    return os.path.exists(os.path.join(where, sign))  # without a descriptor

def look():
    held = []
    while True:
        is_on = is_there("descriptors")
        try:
            while is_on:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        while held and not is_on:
            os.close(held.pop())
        if not is_on:
            ahead_s[0] = AHEAD_S if is_there("clock") else 0
        time.sleep(0.005 if is_on else 0.1)

resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
threading.Thread(target=look, daemon=True).start()
""".replace("AHEAD_S", str(CLOCK_AHEAD_S), 1)


class Meddling:
    """The signs of all nodes, in a folder that nobody else uses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "begins").mkdir()
        (folder / "begins" / "sitecustomize.py").write_text(_BEGINS)

    def environment(self) -> Mapping[str, str]:
        """Variables of all nodes that do what is said here."""
        paths = [str(self._folder / "begins"), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths), _FOLDER: str(self._folder)}

    def set(self, node: str, kind: Kind, *, is_on: bool) -> None:
        """Have a fault begin, or end, in all processes of a node."""
        sign = self._folder / node / _SIGNS[kind]
        sign.parent.mkdir(exist_ok=True)
        sign.touch() if is_on else sign.unlink(missing_ok=True)
