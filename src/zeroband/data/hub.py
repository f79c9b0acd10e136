"""Whether the Hugging Face Hub can be reached: asked once, since its client tries again for a minute, line by line."""

from __future__ import annotations

import functools
import os
import socket
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path

_ANSWER_S = 5.0
_ON = {"1", "ON", "YES", "TRUE"}
_HUB = "https://huggingface.co"


def hub_options(name: str) -> Mapping[str, bool]:
    """Options of transformers' `from_pretrained`: where the hub is away, to take what is in the cache, or to fail."""
    return {"local_files_only": True} if not Path(name).is_dir() and hub_problem() else {}


def hub_hint() -> str:
    """What to say of the hub, behind an error of its client; empty where it answers."""
    problem = hub_problem()
    return f"; {problem}, so only what is in the cache counted" if problem else ""


@functools.cache
def hub_problem() -> str:
    """Why nothing can be fetched from the hub; empty where it answers, or is behind a proxy, or switched off."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _ON:
        return ""
    url = urllib.parse.urlsplit(os.environ.get("HF_ENDPOINT") or _HUB)
    host = url.hostname or ""
    if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return ""
    try:
        socket.create_connection((host, url.port or (80 if url.scheme == "http" else 443)), timeout=_ANSWER_S).close()
    except (OSError, ValueError) as error:
        return f"{url.geturl()} does not answer ({error})"
    return ""
