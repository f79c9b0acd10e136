"""What the members of one save tell each other: each leaves a record of the files that it wrote, or that it wrote none.

The records lie beside the files, under a name of this attempt, so that what an earlier one left does not count. Where
the run has a token they carry a MAC: what a member commits on another's word must be that member's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from zeroband.checkpoint.authenticity import CheckpointKey
from zeroband.checkpoint.layout import PARTS
from zeroband.checkpoint.manifest import FILES, StoredFile
from zeroband.checkpoint.storage import Storage


@dataclass(frozen=True)
class Shares:
    """The records of one attempt at one checkpoint. Any thread."""

    storage: Storage
    folder: str
    """Name of the checkpoint's folder while it is written."""
    attempt: str
    outer: Collection[str]
    """Paths of the outer state's files, of which any member may have written any."""
    key: CheckpointKey | None = None
    """Key made of the run's token; None: it has none."""

    def publish(self, member: str, files: Mapping[str, StoredFile]) -> None:
        """Say that these files of a member are in place. Raises OSError."""
        record = {"files": FILES.dump_python(dict(files), exclude_defaults=True)}
        mac = "" if self.key is None else self.key.mac(self._kind(member), _text(record))
        self.storage.write(self._path(member), (_text({**record, **({"mac": mac} if mac else {})}),))

    def leave_out(self, member: str) -> None:
        """Say that a member does not take part, so that nobody waits for it; never raises."""
        with contextlib.suppress(OSError):
            self.publish(member, {})

    def read(self, member: str) -> dict[str, StoredFile] | None:
        """The files of a member; empty: it does not take part. None while there is no record that makes sense."""
        try:
            record = cast("dict[str, Any]", json.loads(self.storage.read(self._path(member))))
            mac = str(record.pop("mac", ""))
            if self.key is not None and not self.key.is_mac(self._kind(member), _text(record), mac):
                return None
            files = FILES.validate_json(json.dumps(record["files"]), strict=True)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        return {path: file for path, file in files.items() if path in self.outer or path.startswith(f"nodes/{member}/")}

    def _path(self, member: str) -> str:
        return f"{self.folder}/{PARTS}/{self.attempt}-{member}.json"

    def _kind(self, member: str) -> str:
        return f"share {self.attempt} {member}"


def _text(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True).encode()
