"""Imports a user's Python file: an outer algorithm or a model."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from zeroband.errors import ConfigError


@dataclass(frozen=True)
class UserFile:
    """An imported file."""

    module: ModuleType
    digest: str
    """Digest of its content, which must be equal on all nodes."""


def load_file(path: Path, key: str) -> UserFile:
    """Import a file, once per content. `key`: its configuration key. Raises ConfigError if it fails."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{key}={str(path)!r} cannot be read: {error.strerror}") from error
    if path.suffix != ".py":
        raise ConfigError(f"{key}={str(path)!r} is no Python file; its name must end in .py")
    digest = hashlib.sha256(content).hexdigest()
    name = f"zeroband_file_{digest[:16]}"
    if name in sys.modules:
        return UserFile(sys.modules[name], digest)
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = str(path)
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)  # importlib would cache by size and mtime in seconds
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{key}={str(path)!r} cannot be imported: {error!r}") from error
    return UserFile(module, digest)
