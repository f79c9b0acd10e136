"""Compare an export of this machine's uv.lock (standard input) with requirements.lock, before setup.sh installs.

Refuses every package whose version or hashes requirements.lock does not hold. One exception: a CPU-only torch from
wheelhouse/ in place of the same version from the registry.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIGEST_LINE = re.compile(r"^# inputs: sha256:([0-9a-f]{64})$", re.MULTILINE)


def inputs_digest(pyproject: Path) -> str:
    """Digest of all that decides the resolution: dependencies, extras, groups, and the rules for uv."""
    content = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project, uv = content["project"], content["tool"]["uv"]
    inputs = [
        *(project[key] for key in ("requires-python", "dependencies", "optional-dependencies")),
        content["dependency-groups"],
        *(uv[key] for key in ("exclude-newer", "constraint-dependencies")),
    ]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def pins(requirements: str) -> dict[str, frozenset[str]]:
    """Every `name==version` of a requirements file with its hashes."""
    found: dict[str, frozenset[str]] = {}
    entries = re.split(r"^(?=[A-Za-z0-9])", requirements, flags=re.MULTILINE)
    for entry in entries[1:]:
        found[entry.split(maxsplit=1)[0]] = frozenset(re.findall(r"--hash=(\S+)", entry))
    return found


def differences(export: str, tracked: str) -> list[str]:
    """What the export pins that the tracked file does not, named with the reason."""
    allowed = pins(tracked)
    wrong: list[str] = []
    for name, hashes in pins(export).items():
        if name not in allowed:
            if not (re.fullmatch(r"torch==[^+]+\+cpu", name) and name.partition("+")[0] in allowed):
                wrong.append(f"{name} is not in it")
        elif hashes != allowed[name]:
            wrong.append(f"{name} has other hashes in it")
    return wrong


def main() -> int:
    export = sys.stdin.read()
    tracked = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    digest = DIGEST_LINE.search(tracked)
    if digest is None or digest[1] != inputs_digest(ROOT / "pyproject.toml"):
        print("requirements.lock is older than pyproject.toml; run ./scripts/lock.sh", file=sys.stderr)
        return 1
    wrong = differences(export, tracked)
    if wrong:
        print("This machine's resolution differs from requirements.lock:", *wrong, sep="\n  ", file=sys.stderr)
        print("Nothing was installed. Ask what the index serves.", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
