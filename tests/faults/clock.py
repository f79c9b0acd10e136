"""A wrong wall clock for one node: a library that is loaded before all others and shifts what they read."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clock.c")


def preload(folder: Path, offset_s: int) -> dict[str, str]:
    """The environment of a node whose clock is `offset_s` ahead of this machine's. The library is built in `folder`."""
    library = folder / "clock.so"
    if not library.exists():
        subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(SOURCE)], check=True, timeout=60)
    others = os.environ.get("LD_PRELOAD", "")
    return {"LD_PRELOAD": f"{library} {others}".strip(), "CLOCK_OFFSET_S": str(offset_s)}
