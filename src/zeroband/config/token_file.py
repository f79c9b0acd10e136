"""Reads the run's token from a file, which keeps it off command lines and out of environments."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pydantic import SecretStr

from zeroband.errors import ConfigError

_MOST_BYTES = 4096


def read_token(path: Path) -> SecretStr:
    """Return the file's content without the newline. Raises ConfigError.

    Refuses a file that every user may read, unless it is root's, which is how containers mount secrets.
    """
    name = f"run.token_file={str(path)!r}"
    try:
        with path.open("rb") as file:
            content, found = file.read(_MOST_BYTES + 1), os.fstat(file.fileno())
        token = content.decode().rstrip("\r\n")
    except OSError as error:
        raise ConfigError(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{name} holds no text; one line with the token is needed") from None
    if found.st_mode & (stat.S_IWOTH if found.st_uid == 0 else stat.S_IWOTH | stat.S_IROTH):
        mode = f"{stat.S_IMODE(found.st_mode):04o}"
        raise ConfigError(f"{name} is open to every user of this machine (mode {mode}); chmod 600 it")
    if not token or len(content) > _MOST_BYTES:
        what = "is empty" if not token else f"is longer than {_MOST_BYTES} bytes"
        raise ConfigError(f"{name} {what}; one line with the token is needed, such as that of `openssl rand -hex 32`")
    return SecretStr(token)
