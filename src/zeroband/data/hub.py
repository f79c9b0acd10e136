"""Checks once whether the Hugging Face Hub is reachable; its own client would retry for a minute first."""

from __future__ import annotations

import functools
import importlib
import os
import urllib.parse
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zeroband.errors import ConfigError

_TIMEOUT_S = 5.0
_ON = {"1", "ON", "YES", "TRUE"}


def hub_options(name: str, key: str) -> Mapping[str, bool]:
    """Return options for transformers' `from_pretrained`: use only the cache while the hub is unreachable.

    key: configuration key of the name. Raises: ConfigError if the name is a path without a folder.
    """
    if Path(name).is_dir():
        return {}
    if not is_hub_name(name):
        problem = "this is a file; name its folder" if Path(name).exists() else "no such folder; correct it"
        raise ConfigError(f"{key}={name!r}: {problem}, or give a name on the Hugging Face Hub (owner/name)")
    return {"local_files_only": True} if hub_problem() else {}


def is_hub_name(name: str) -> bool:
    """Return whether a name can only refer to the hub: it looks like no path, and no such file exists."""
    return not name.startswith(("/", ".", "~")) and name.count("/") <= 1 and not Path(name).exists()


def hub_hint() -> str:
    """Return a suffix for errors of the hub's client; empty if the hub answers."""
    problem = hub_problem()
    return f"; {problem}, so only the cache was searched" if problem else ""


def require_hub(url: str, key: str) -> None:
    """Raise ConfigError for a URL of the hub (`hf://`) while it is unreachable. `key`: configuration key of the URL."""
    if url.partition("://")[0].rpartition("::")[2] == "hf" and (problem := hub_problem()):
        raise ConfigError(
            f"{key}: {url!r} is on the Hugging Face Hub, and {problem}; connect this machine to it, or name a local "
            "copy, made with `hf download --repo-type dataset` on another machine"
        )


def hub_problem(timeout_s: float = _TIMEOUT_S) -> str:
    """Return why the hub is unreachable; empty if it answers, is behind a proxy, or is switched off."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in _ON:
        return ""
    try:
        hub: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        return ""  # the caller reports it
    endpoint: str = hub.constants.ENDPOINT
    url = urllib.parse.urlsplit(endpoint)
    if url.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(url.hostname or ""):
        return ""
    return _problem_of(endpoint, timeout_s)


@functools.cache
def _problem_of(endpoint: str, timeout_s: float) -> str:
    """Return why a server does not answer; empty if it does, with any status."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    try:
        utils.get_session().head(endpoint, timeout=timeout_s)
    except Exception as error:  # noqa: BLE001 - of whichever HTTP library this release uses
        return f"{endpoint} does not answer ({error})"
    return ""
