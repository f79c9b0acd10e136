"""Whether the Hugging Face Hub can be reached: asked once, since its client tries again for a minute, line by line."""

from __future__ import annotations

import functools
import http.client
import importlib
import os
import ssl
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroband.errors import ConfigError

_ANSWER_S = 5.0
_ON = {"1", "ON", "YES", "TRUE"}
_HUB = "https://huggingface.co"


def hub_options(name: str, key: str) -> Mapping[str, bool]:
    """Options of transformers' `from_pretrained`: where the hub is away, to take what is in the cache, or to fail.

    key: where the name stands. Raises: ConfigError where the name is a path, and no folder lies there.
    """
    if Path(name).is_dir():
        return {}
    if not is_hub_name(name):
        problem = "this is a file; name its folder" if Path(name).exists() else "there is no such folder; correct it"
        raise ConfigError(f"{key}={name!r}: {problem}, or give a name on the Hugging Face Hub (owner/name)")
    return {"local_files_only": True} if hub_problem() else {}


def is_hub_name(name: str) -> bool:
    """Whether what has this name can lie on the hub alone: it is no path, and nothing here is called so."""
    return not name.startswith(("/", ".", "~")) and name.count("/") <= 1 and not Path(name).exists()


def hub_hint() -> str:
    """What to say of the hub, behind an error of its client; empty where it answers."""
    problem = hub_problem()
    return f"; {problem}, so only what is in the cache counted" if problem else ""


def require_hub(url: str, key: str) -> None:
    """Raise ConfigError where a URL is one of the hub's (`hf://`), and the hub is away. `key`: where the URL stands."""
    if url.partition("://")[0].rpartition("::")[2] == "hf" and (problem := hub_problem()):
        raise ConfigError(
            f"{key}: {url!r} lies on the Hugging Face Hub, and {problem}; connect this machine to it, or name a copy "
            "on a disk, as `hf download --repo-type dataset` makes it on another machine"
        )


def hub_problem(answer_s: float = _ANSWER_S) -> str:
    """Why nothing can be fetched from the hub; empty where it answers, or is behind a proxy, or switched off."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _ON:
        return ""
    endpoint = _endpoint()
    url = urllib.parse.urlsplit(endpoint)
    if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or ""):
        return ""
    return _problem_of(endpoint, answer_s)


def _endpoint() -> str:
    """The address that the hub's client asks, which it reads from HF_ENDPOINT."""
    try:
        constants: Any = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return os.environ.get("HF_ENDPOINT") or _HUB
    return constants.ENDPOINT


@functools.cache
def _problem_of(endpoint: str, answer_s: float) -> str:
    """Why a server does not answer a request; empty where it does, with whatever status."""
    url = urllib.parse.urlsplit(endpoint)
    kind = http.client.HTTPConnection if url.scheme == "http" else http.client.HTTPSConnection
    try:
        connection = kind(url.hostname or "", url.port, timeout=answer_s)
        try:
            connection.request("HEAD", url.path or "/")
            connection.getresponse()
        finally:
            connection.close()
    except ssl.SSLCertVerificationError:
        return ""  # the client may trust certificates that Python does not know
    except (OSError, ValueError, http.client.HTTPException) as error:
        return f"{endpoint} does not answer ({error})"
    return ""
