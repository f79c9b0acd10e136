"""Commands of ours in what we print: as their reader can type them."""

from __future__ import annotations

import shlex
import shutil
import sysconfig
from pathlib import Path

PROGRAM = "zeroband"


def command(*words: object) -> str:
    """A command that a reader can type: its words quoted for a shell."""
    return shlex.join([PROGRAM, *map(str, words)])


def typed(*words: object) -> str:
    """A command for this machine and folder, which runs as it stands.

    Its program is `zeroband` where the PATH leads to this installation, else the path of that.
    """
    ours = Path(sysconfig.get_path("scripts")) / PROGRAM
    found = shutil.which(PROGRAM)
    if not ours.exists() or (found is not None and Path(found).resolve() == ours.resolve()):
        return command(*words)
    place = ours.relative_to(Path.cwd()) if ours.is_relative_to(Path.cwd()) else ours
    return shlex.join([str(place), *map(str, words)])
